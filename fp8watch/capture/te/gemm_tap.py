"""One set of patches a process on Transformer Engine's GEMM calls: where scales pass that nothing keeps.

`general_gemm` is imported by name into the modules that use it (TE 2.20 `pytorch/module/linear.py` 75,
`layernorm_linear.py` 97, `layernorm_mlp.py` 94) and looked up there at each call, so it is replaced there. Its
operands are the quantized tensors: forward (weight, input), layout TN; gradient of the input (weight,
grad_output), NN; gradient of the weight (input, grad_output), NT.

Which module a call belongs to: in the forward the one whose `prepare_forward` ran last on this thread; in the
backward the one whose forward had the same weight (or input), told by the address of its scales, which are saved
from forward to backward. Under CUDA graphs only the capture passes here.
"""

from __future__ import annotations

import importlib
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch

from fp8watch.capture.patches import Patches
from fp8watch.capture.te.tensors import is_delayed, scale_addresses

logger = logging.getLogger(__name__)

GEMM = "general_gemm"
CONSUMERS = ("linear", "layernorm_linear", "layernorm_mlp")
KEPT_ADDRESSES = 65536

Role = Literal["input", "weight", "grad_output"]
Subscriber = Callable[[Any, int, Role, Any], None]
"""Called with the module, the number of its GEMM in the forward, the operand's role and the quantized operand."""


class _Local(threading.local):
    module: Any = None
    gemm = 0
    last_gradient: weakref.ref[Any] | None = None
    """The grad_output of the last NN call: NT follows with the same object."""


class GemmTap:
    """The patches; put in by the first subscriber and taken out by the last."""

    def __init__(self, package: str = "transformer_engine.pytorch.module") -> None:
        self._package = package
        self._subscribers: tuple[Subscriber, ...] = ()
        self._lock = threading.Lock()
        self._local = _Local()
        self._owners: dict[int, tuple[weakref.ref[Any], int]] = {}
        """Address of a scale array -> module and number of the GEMM whose operand it scales."""
        self._patches = Patches()
        self.num_failures = 0
        """Subscribers that raised and were dropped."""
        self.num_unmatched = 0
        """Backward GEMMs whose module could not be told."""

    def subscribe(self, subscriber: Subscriber) -> None:
        """Raises `ImportError` or `AttributeError` where this TE has no such functions."""
        with self._lock:
            if not self._patches:
                self._install()
            self._subscribers = (*self._subscribers, subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """The last one out restores the original functions."""
        with self._lock:
            self._subscribers = tuple(s for s in self._subscribers if s != subscriber)
            if not self._subscribers:
                self._uninstall()

    def _install(self) -> None:
        base = importlib.import_module(f"{self._package}.base").TransformerEngineBaseModule
        consumers = [importlib.import_module(f"{self._package}.{name}") for name in CONSUMERS]
        places = [(base, "prepare_forward", self._tapped_prepare)]
        places += [(module, GEMM, self._tapped_gemm) for module in consumers if hasattr(module, GEMM)]
        if len(places) == 1:
            raise AttributeError(f"no {GEMM} in {self._package}")
        self._patches.put(places)

    def _uninstall(self) -> None:
        self._patches.take_out()
        self._owners.clear()

    def _tapped_prepare(self, original: Callable[..., Any]) -> Callable[..., Any]:
        tap = self

        def prepare_forward(self: Any, *args: Any, **options: Any) -> Any:
            local = tap._local
            # Evaluation is no step's business; a forward inside a backward pass is a recomputation.
            is_training = torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1
            local.module, local.gemm = (self if is_training else None), 0
            return original(self, *args, **options)

        return prepare_forward

    def _tapped_gemm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def general_gemm(A: Any, B: Any, *args: Any, **options: Any) -> Any:
            if self._subscribers:
                try:
                    self._look(A, B, options.get("layout", "TN"))
                except Exception:
                    self.num_failures += 1
                    logger.warning("fp8watch: the tap on TE's GEMMs failed and is switched off", exc_info=True)
                    self._subscribers = ()
            return original(A, B, *args, **options)

        return general_gemm

    def _look(self, first: Any, second: Any, layout: str) -> None:
        local = self._local
        if layout == "TN":
            module, gemm = local.module, local.gemm
            local.gemm += 1
            if module is None:
                return
            if len(self._owners) > KEPT_ADDRESSES:
                self._owners.clear()
            owner = (weakref.ref(module), gemm)
            for address in (*scale_addresses(first), *scale_addresses(second)):
                self._owners[address] = owner
            self._tell(module, gemm, "weight", first)
            self._tell(module, gemm, "input", second)
            return
        last, local.last_gradient = local.last_gradient, None
        if layout == "NT" and last is not None and last() is second:
            return
        if layout == "NN":
            local.last_gradient = weakref.ref(second)  # an address alone may be somebody else's by then
        if next(scale_addresses(second), None) is None:
            return  # high precision
        found = next((self._owners[a] for a in scale_addresses(first) if a in self._owners), None)
        module = None if found is None else found[0]()
        if found is None or module is None:
            self.num_unmatched += 1
            return
        self._tell(module, found[1], "grad_output", second)

    def _tell(self, module: Any, gemm: int, role: Role, operand: Any) -> None:
        if is_delayed(operand) or next(scale_addresses(operand), None) is None:
            return
        for subscriber in self._subscribers:
            subscriber(module, gemm, role, operand)


gemm_tap = GemmTap()
"""The process's own."""
