"""One set of patches per process on torchao's float8 training casts, shared by all watches.

torchao keeps no scale: `Float8Linear` computes one per cast and forgets it. Every scale is an argument of
`hp_tensor_and_scale_to_float8` (torchao 0.18 `float8/float8_scaling_utils.py`; with FP8 all-gather also
`float8/fsdp_utils.py`), and the amax that it was made from is one of `float8_utils.amax_to_scale` just before. Both
functions are looked up as globals of the calling module at each call, so replacing them there also works for layers
built earlier. `Float8Linear.forward` is wrapped too, for two things that a cast cannot tell: whether gradients are on
(inside an `autograd.Function` they never are), and, while a graph is traced, which layer it is.

Under `torch.compile` these functions run only while tracing, on fake tensors, which are ignored; see
`fp8watch.capture.torchao.compiled` for the alternative. The patches add no graph break.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

import torch

from fp8watch.capture.patches import Patches
from fp8watch.capture.torchao.compiled import noted_forward

logger = logging.getLogger(__name__)

CASTS = ("torchao.float8.float8_scaling_utils", "torchao.float8.fsdp_utils")
"""Modules that look up the cast in their namespace. The first must have it, the second may."""
CAST = "hp_tensor_and_scale_to_float8"
TO_SCALE = ("torchao.float8.float8_utils", "amax_to_scale")


Phase = Literal["forward", "recompute", "backward", "evaluation"]
"""When a cast happened. `recompute` is a forward inside a backward pass; FP8 all-gather counts as `forward`."""


class Tap(Protocol):
    """Listener. Called on the thread of the cast (autograd's in a backward pass); must not change its arguments."""

    def on_cast(
        self, owner: int, role: str, phase: Phase, *, amax: torch.Tensor | None, scale: torch.Tensor,
        values: torch.Tensor, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """`owner`: identity of the layer's `linear_mm_config`; `role`: input, weight or grad_output.

        `amax` (None: the scale was made elsewhere) and `scale` have one element, or one per row or column.
        """

    def on_high_precision(self, owner: int, role: str, phase: Phase, values: torch.Tensor) -> None:
        """A layer that `controls` keeps in BF16 ran on `values`: nothing was cast."""


class _Local(threading.local):
    is_forward = False
    """Inside a `Float8Linear.forward`."""
    is_evaluation = False
    """That forward runs without gradients."""
    last: tuple[Any, Any] = (None, None)
    """The last scale made on this thread, and the amax that it was made from."""


class CastTaps:
    """The patches. The first tap puts them in, the last one takes them out."""

    def __init__(self) -> None:
        self._taps: tuple[Tap, ...] = ()
        self._local = _Local()
        self._lock = threading.Lock()
        self._patches = Patches()
        self.num_failures = 0
        """Taps that raised and were dropped."""

    def add(self, tap: Tap) -> None:
        """Start listening. Raises `ImportError` or `AttributeError` if this torchao has no such cast."""
        with self._lock:
            if not self._patches:
                self._install()
            self._taps = (*self._taps, tap)

    def remove(self, tap: Tap) -> None:
        """Stop listening; no effect if it does not listen."""
        with self._lock:
            self._taps = tuple(other for other in self._taps if other is not tap)
            if not self._taps:
                self._patches.take_out()

    @property
    def is_installed(self) -> bool:
        """Whether any patch is in place."""
        return bool(self._patches)

    def _install(self) -> None:
        linear = importlib.import_module("torchao.float8.float8_linear").Float8Linear
        scaling = importlib.import_module(TO_SCALE[0])
        places: list[tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = [
            (importlib.import_module(CASTS[0]), CAST, self._tapped_cast),
            (scaling, TO_SCALE[1], self._tapped_scale),
            (linear, "forward", self._tapped_forward),
        ]
        fsdp = importlib.import_module(CASTS[1])
        if hasattr(fsdp, CAST):
            places.append((fsdp, CAST, self._tapped_cast))
        self._patches.put(places)

    def _tapped_scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def amax_to_scale(amax: torch.Tensor, *args: Any, **options: Any) -> Any:
            scale = original(amax, *args, **options)
            if not torch.compiler.is_compiling():
                self._local.last = (scale, amax)
            return scale

        return amax_to_scale

    def _tapped_cast(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def hp_tensor_and_scale_to_float8(
            hp_tensor: torch.Tensor, s: torch.Tensor, float8_dtype: torch.dtype, linear_mm_config: Any = None,
            *args: Any, **options: Any,
        ) -> Any:  # fmt: skip
            if not torch.compiler.is_compiling():
                role = args[0] if args else options.get("gemm_input_role")
                self._tell(hp_tensor, s, float8_dtype, linear_mm_config, str(getattr(role, "value", role)))
            return original(hp_tensor, s, float8_dtype, linear_mm_config, *args, **options)

        return hp_tensor_and_scale_to_float8

    def _tell(self, values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, config: Any, role: str) -> None:
        made, amax = self._local.last
        self._local.last = (None, None)
        known = amax if made is scale else None
        for tap in self._taps:
            try:
                tap.on_cast(id(config), role, self._phase(), amax=known, scale=scale, values=values, dtype=dtype)
            except Exception:
                self._drop(tap)

    def tell_high_precision(self, owner: int, role: str, values: torch.Tensor) -> None:
        """Called by a layer in BF16 with the tensors that it ran on, because it has no cast that could be tapped."""
        for tap in self._taps:
            try:
                tap.on_high_precision(owner, role, self._phase(), values)
            except Exception:
                self._drop(tap)

    @contextlib.contextmanager
    def in_forward(self) -> Iterator[None]:
        """Context for the forward of a layer, on its thread."""
        local = self._local
        before = (local.is_forward, local.is_evaluation)
        local.is_forward, local.is_evaluation = True, not torch.is_grad_enabled()
        try:
            yield
        finally:
            local.is_forward, local.is_evaluation = before

    def _phase(self) -> Phase:
        is_in_backward = torch._C._current_graph_task_id() != -1
        if not self._local.is_forward:
            return "backward" if is_in_backward else "forward"
        if self._local.is_evaluation and not is_in_backward:
            return "evaluation"
        return "recompute" if is_in_backward else "forward"

    def _drop(self, tap: Tap) -> None:
        self.num_failures += 1
        logger.warning("fp8watch: a tap on torchao's casts failed and is switched off", exc_info=True)
        self._taps = tuple(other for other in self._taps if other is not tap)

    def _tapped_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        taps = self

        def forward(self: torch.nn.Module, input: torch.Tensor) -> Any:
            if torch.compiler.is_compiling():
                return noted_forward(original, self, input)
            with taps.in_forward():
                return original(self, input)

        return forward


taps = CastTaps()
"""The taps of this process."""
