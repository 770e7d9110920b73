"""One set of patches per process on Transformer Engine's GEMM calls, for recipes whose scales are stored nowhere else.

`general_gemm` is imported by name into the modules that use it (TE 2.20 `pytorch/module/linear.py` 75,
`layernorm_linear.py` 97, `layernorm_mlp.py` 94) and looked up there at each call, so it is replaced there. So is
`general_grouped_gemm` in `grouped_linear.py` 61, which takes lists. Operands are the quantized tensors: forward
(weight, input), layout TN; gradient of the input (weight, grad_output), NN; gradient of the weight (input,
grad_output), NT.

Which module a call belongs to: in the forward, the one whose `prepare_forward` ran last on this thread; in the
backward, the one whose forward had the same weight (or input). That is recognised by the memory of its scales, which
are saved from forward to backward; an address that was reused meanwhile is ignored. Under CUDA graphs only the capture
calls these functions.
"""

from __future__ import annotations

import importlib
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fp8watch.capture.patches import Make, Patches
from fp8watch.capture.te.tensors import is_delayed, is_empty, scale_arrays

logger = logging.getLogger(__name__)

GEMM = "general_gemm"
CONSUMERS = ("linear", "layernorm_linear", "layernorm_mlp")
GROUPED, GROUPED_CONSUMER = "general_grouped_gemm", "grouped_linear"
KEPT_ADDRESSES = 65536

Role = Literal["input", "weight", "grad_output"]
Subscriber = Callable[[Any, int, Role, Any], None]
"""Called with the module, the number of its GEMM in the forward, the operand's role and the quantized operand."""


_NOBODY: tuple[Callable[[], Any], int, None] = (lambda: None, 0, None)


class _Local(threading.local):
    module: Any = None
    gemm = 0
    last_gradients: tuple[weakref.ref[Any], ...] = ()
    """The grad_output operands of the last NN call, which an NT call with the same objects follows."""


class GemmTap:
    """The patches. The first subscriber puts them in, the last one takes them out."""

    def __init__(self, package: str = "transformer_engine.pytorch.module") -> None:
        self._package = package
        self._subscribers: tuple[Subscriber, ...] = ()
        self._lock = threading.Lock()
        self._local = _Local()
        self._owners: dict[int, tuple[weakref.ref[Any], int, StorageWeakRef]] = {}
        """Address of a scale array -> module and number of the GEMM whose operand it scales, and its memory."""
        self._patches = Patches()
        self.num_failures = 0
        """Subscribers that raised and were dropped."""
        self.num_unmatched = 0
        """Backward GEMMs whose module could not be determined."""

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call it for every operand. Raises `ImportError` or `AttributeError` if this TE has no such functions."""
        with self._lock:
            if not self._patches:
                self._install()
            self._subscribers = (*self._subscribers, subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Stop calling it. After the last one the original functions are restored."""
        with self._lock:
            self._subscribers = tuple(s for s in self._subscribers if s != subscriber)
            if not self._subscribers:
                self._uninstall()

    def _install(self) -> None:
        base = importlib.import_module(f"{self._package}.base").TransformerEngineBaseModule
        consumers = [importlib.import_module(f"{self._package}.{name}") for name in CONSUMERS]
        places: list[tuple[Any, str, Make]] = [
            (module, GEMM, self._tapped_gemm) for module in consumers if hasattr(module, GEMM)
        ]
        if not places:
            raise AttributeError(f"no {GEMM} in {self._package}")
        places.append((base, "prepare_forward", self._tapped_prepare))
        if hasattr(base, "end_forward"):
            places.append((base, "end_forward", self._tapped_end))
        try:
            grouped = importlib.import_module(f"{self._package}.{GROUPED_CONSUMER}")
        except ImportError:  # older than grouped GEMMs
            grouped = None
        if hasattr(grouped, GROUPED):
            places.append((grouped, GROUPED, self._tapped_grouped))
        self._patches.put(places)

    def _uninstall(self) -> None:
        self._patches.take_out()
        self._owners.clear()

    def _tapped_prepare(self, original: Callable[..., Any]) -> Callable[..., Any]:
        tap = self

        def prepare_forward(self: Any, *args: Any, **options: Any) -> Any:
            local = tap._local
            # Ignore evaluation; a forward inside a backward pass is a recomputation.
            is_training = torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1
            local.module, local.gemm = (self if is_training else None), 0
            return original(self, *args, **options)

        return prepare_forward

    def _tapped_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        tap = self

        def end_forward(self: Any, *args: Any, **options: Any) -> Any:
            # LayerNormMLP recomputes in its backward, which is not a forward of the module that ran last on the thread.
            tap._local.module = None
            return original(self, *args, **options)

        return end_forward

    def _tapped_gemm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def general_gemm(A: Any, B: Any, *args: Any, **options: Any) -> Any:
            if self._subscribers:
                self._guarded((A,), (B,), options)
            return original(A, B, *args, **options)

        return general_gemm

    def _tapped_grouped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def general_grouped_gemm(A: Any, B: Any, *args: Any, **options: Any) -> Any:
            if self._subscribers:
                self._guarded(A, B, options)
            return original(A, B, *args, **options)

        return general_grouped_gemm

    def _guarded(self, first: Sequence[Any], second: Sequence[Any], options: Mapping[str, Any]) -> None:
        try:
            self._look(first, second, options.get("layout", "TN"))
        except Exception:
            self.num_failures += 1
            logger.warning("fp8watch: the tap on TE's GEMMs failed and is switched off", exc_info=True)
            self._subscribers = ()

    def _look(self, first: Sequence[Any], second: Sequence[Any], layout: str) -> None:
        """One call; `first` and `second` hold one operand per GEMM."""
        local = self._local
        if layout == "TN":
            for weight, given in zip(first, second, strict=True):
                self._look_forward(weight, given)
            return
        last, local.last_gradients = local.last_gradients, ()
        if layout == "NN":
            local.last_gradients = tuple(map(weakref.ref, second))  # references, because an address may be reused
        elif len(last) == len(second) and all(
            known() is gradient for known, gradient in zip(last, second, strict=True)
        ):
            return
        for operand, gradient in zip(first, second, strict=True):
            self._look_backward(operand, gradient)

    def _look_forward(self, weight: Any, given: Any) -> None:
        local = self._local
        module, gemm = local.module, local.gemm
        local.gemm += 1
        if module is None:
            return
        if len(self._owners) > KEPT_ADDRESSES:
            self._owners.clear()
        owner = weakref.ref(module)
        for array in (*scale_arrays(weight), *scale_arrays(given)):
            memory = StorageWeakRef(array.untyped_storage())  # type: ignore[no-untyped-call]
            self._owners[array.data_ptr()] = (owner, gemm, memory)
        self._tell(module, gemm, "weight", weight)
        self._tell(module, gemm, "input", given)

    def _look_backward(self, first: Any, second: Any) -> None:
        if next(scale_arrays(second), None) is None:
            return  # high precision
        for array in scale_arrays(first):
            owner, gemm, memory = self._owners.get(array.data_ptr(), _NOBODY)
            if memory is None or memory.expired():  # type: ignore[no-untyped-call]
                continue
            if (module := owner()) is not None:
                self._tell(module, gemm, "grad_output", second)
                return
        self.num_unmatched += 1

    def _tell(self, module: Any, gemm: int, role: Role, operand: Any) -> None:
        if is_delayed(operand) or next(scale_arrays(operand), None) is None or is_empty(operand):
            return
        for subscriber in self._subscribers:
            subscriber(module, gemm, role, operand)


gemm_tap = GemmTap()
"""The tap of this process."""
