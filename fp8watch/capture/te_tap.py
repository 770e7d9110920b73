"""One patch a process on Transformer Engine's delayed-scaling update, shared by all watches.

TE concatenates the amaxes of every registered module, reduces them over its group and hands them with all
histories and scales to `transformer_engine_torch.fused_amax_and_scale_update_after_reduction`, once a
direction and micro-batch (TE 2.20 `pytorch/quantization.py` 656). Looking at the arguments *before* the call
shows the reduced amaxes and the scales that were just used for casting, at the price of nothing.

The attribute is looked up on the module at every call, so replacing it works also after models were built
and under CUDA graphs, whose scale updates run outside the graph. The backward call comes from autograd's
thread. A subscriber that raises is dropped and counted: training never hears of it.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

logger = logging.getLogger(__name__)

UPDATE = "fused_amax_and_scale_update_after_reduction"

Subscriber = Callable[[torch.Tensor, Sequence[torch.Tensor]], None]
"""Called with the reduced amax vector (float32, [n]) and the list of scale tensors it belongs to."""


class UpdateTap:
    """The patch; it is put in by the first subscriber and taken out by the last."""

    def __init__(self, extension: Any) -> None:
        self._extension = extension
        self._original: Callable[..., Any] | None = None
        self._installed: Callable[..., Any] | None = None
        self._subscribers: tuple[Subscriber, ...] = ()
        self._lock = threading.Lock()
        self.num_failures = 0
        """Subscribers that raised and were dropped."""

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call `subscriber` at every update from now on."""
        with self._lock:
            if self._original is None:
                self._install()
            self._subscribers = (*self._subscribers, subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Stop calling it; the last one out restores the original function."""
        with self._lock:
            self._subscribers = tuple(s for s in self._subscribers if s != subscriber)
            if not self._subscribers:
                self._remove()

    def _install(self) -> None:
        original = getattr(self._extension, UPDATE)

        def tapped(amax: torch.Tensor, histories: Any, scales: Any, *rest: Any, **options: Any) -> Any:
            for subscriber in self._subscribers:
                try:
                    subscriber(amax, scales)
                except Exception:
                    self.num_failures += 1
                    logger.warning("fp8watch: a tap on TE's scale update failed and is switched off", exc_info=True)
                    self._subscribers = tuple(s for s in self._subscribers if s != subscriber)
            return original(amax, histories, scales, *rest, **options)

        setattr(self._extension, UPDATE, tapped)
        self._original, self._installed = original, tapped

    def _remove(self) -> None:
        if self._original is not None and getattr(self._extension, UPDATE) is self._installed:
            setattr(self._extension, UPDATE, self._original)
            self._original = self._installed = None
        # Somebody patched on top of us: ours stays underneath as a pass-through until they leave.


_taps: dict[int, UpdateTap] = {}


def update_tap(extension: Any | None = None) -> UpdateTap:
    """The process's tap. Raises `AttributeError` or `ImportError` where this TE has no such function."""
    if extension is None:
        extension = importlib.import_module("transformer_engine_torch")
    getattr(extension, UPDATE)
    return _taps.setdefault(id(extension), UpdateTap(extension))
