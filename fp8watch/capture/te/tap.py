"""One patch per process on Transformer Engine's delayed-scaling update, shared by all watches.

TE concatenates the amaxes of every registered module, reduces them over its group and passes them with all histories
and scales to `transformer_engine_torch.fused_amax_and_scale_update_after_reduction`, once per direction and
micro-batch (TE 2.20 `pytorch/quantization.py` 656). *Before* the call its arguments hold the reduced amaxes and the
scales that were just used for casting, so reading them costs nothing. The reduction hides which rank was extreme, so
each rank's own amaxes are copied before it (`FP8GlobalStateManager.reduce_tensor_across_group_op_max`, called only if
there are ranks to reduce with).

The attribute is looked up on the module at every call, so replacing it also works after models were built, and under
CUDA graphs, whose scale updates run outside the graph. The backward call comes from autograd's thread. A subscriber
that raises is dropped and counted; training is not affected.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from fp8watch.capture.patches import Patches

logger = logging.getLogger(__name__)

UPDATE = "fused_amax_and_scale_update_after_reduction"
REDUCE = "reduce_tensor_across_group_op_max"

Subscriber = Callable[..., None]
"""Called with the reduced amax vector (float32 [n]) and the list of scale tensors that it belongs to. If ranks have
reduced it, also with this rank's own vector, a copy from before the reduction."""


class UpdateTap:
    """The patch. The first subscriber puts it in, the last one takes it out."""

    def __init__(self, extension: Any, manager: Any | None = None) -> None:
        """`manager`: the class with the reduction; None: values before the reduction are not observed."""
        self._extension, self._manager = extension, manager
        self._patches = Patches()
        self._reduction: Any = None
        """The manager's original static method while ours replaces it."""
        self._is_reduced = False
        """Whether ranks have ever reduced their amaxes: a single rank need not look for its own."""
        self._local = threading.local()
        self._subscribers: tuple[Subscriber, ...] = ()
        self._lock = threading.Lock()
        self.num_failures = 0
        """Subscribers that raised and were dropped."""

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call `subscriber` at every update from now on."""
        with self._lock:
            if not self._patches:
                self._patches.put([(self._extension, UPDATE, self._tapped)])
                self._reduction = getattr(self._manager, "__dict__", {}).get(REDUCE)
                if isinstance(self._reduction, staticmethod):
                    setattr(self._manager, REDUCE, self._tapped_reduction(self._reduction))
            self._subscribers = (*self._subscribers, subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Stop calling it. After the last one the original function is restored."""
        with self._lock:
            self._subscribers = tuple(s for s in self._subscribers if s != subscriber)
            if not self._subscribers:
                self._patches.take_out()
                if isinstance(self._reduction, staticmethod):
                    setattr(self._manager, REDUCE, self._reduction)
                self._reduction = None

    def _tapped_reduction(self, original: Any) -> Any:
        def reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            # Kept until the next update on this thread, which gets the same tensor.
            self._is_reduced = True
            self._local.before = (tensor, tensor.clone()) if self._subscribers else None
            return original.__func__(tensor, *args, **options)

        return staticmethod(reduce)

    def _before(self, amax: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept = getattr(self._local, "before", None)
        if kept is None:
            return ()
        self._local.before = None
        return (kept[1],) if kept[0] is amax else ()

    def _tapped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def tapped(amax: torch.Tensor, histories: Any, scales: Any, *rest: Any, **options: Any) -> Any:
            before = self._before(amax) if self._is_reduced else ()
            for subscriber in self._subscribers:
                try:
                    subscriber(amax, scales, *before)
                except Exception:
                    self.num_failures += 1
                    logger.warning("fp8watch: a tap on TE's scale update failed and is switched off", exc_info=True)
                    self._subscribers = tuple(s for s in self._subscribers if s != subscriber)
            return original(amax, histories, scales, *rest, **options)

        return tapped


_taps: dict[int, UpdateTap] = {}


def update_tap(extension: Any | None = None) -> UpdateTap:
    """The tap of this process. Raises `AttributeError` or `ImportError` if this TE has no such function."""
    if extension is None:
        extension = importlib.import_module("transformer_engine_torch")
        quantization = importlib.import_module("transformer_engine.pytorch.quantization")
        manager = getattr(quantization, "FP8GlobalStateManager", None)
    else:
        manager = getattr(extension, "manager", None)
    getattr(extension, UPDATE)
    return _taps.setdefault(id(extension), UpdateTap(extension, manager))
