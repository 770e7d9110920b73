"""Which forward a cast belongs to: determines when scales are updated, and which scales a recomputation must reuse.

A region is one forward of a model, from the outermost call of a converted root (or `autocast`) to its end. At its end
the forward scales are updated once, if gradients are on. Its backward updates the gradient scales once, when the whole
backward is over. Transformer Engine does that in the backward of the region's first module, which under recomputation
may run before others or not be the first at all. The autograd engine's final callback, used here, comes after every
gradient was cast, in any order, and exactly once per backward.

A forward that runs during a backward is a recomputation (activation checkpointing, either kind). It belongs to the
region of that backward: it casts with the scales that the region used, records no amax and updates nothing. The region
is known from a hook on the root's outputs or from an FP8 layer's backward.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

from fp8watch.emulation import checks
from fp8watch.emulation.update import update_scales

if TYPE_CHECKING:
    from fp8watch.emulation.linear import Fp8Linear


@dataclass(frozen=True, slots=True)
class Call:
    """What a module's casts in one region use. `scale`: float32 [2] (input, weight), a copy."""

    scale: torch.Tensor
    is_high_precision: bool


class Region:
    """One forward and its backward. Holds modules weakly, because the autograd graph keeps regions alive."""

    def __init__(self, owner: torch.nn.Module | None, frame: FrameType | None = None) -> None:
        self.is_training = torch.is_grad_enabled()
        self.depth = 1
        self.frame = frame
        self._owner = None if owner is None else weakref.ref(owner)
        self._calls: weakref.WeakKeyDictionary[Fp8Linear, Call] = weakref.WeakKeyDictionary()
        self._is_backward_under_way = False
        self._is_forward_updated = False

    def call(self, module: Fp8Linear) -> Call:
        """Scales and precision of this module's casts in the region, fixed at its first call."""
        found = self._calls.get(module)
        if found is None:
            found = Call(module.scaling_forward.scale.clone(), module.is_high_precision)
            self._calls[module] = found
            if not torch.is_inference_mode_enabled():
                _newest[module] = self
        return found

    def has_run(self, module: Fp8Linear) -> bool:
        """Whether the module was called in this region."""
        return module in self._calls

    def finish_forward(self, output: Any) -> None:
        """The outermost call returned `output`: update the forward scales, and hook the beginning of its backward."""
        if not self.is_training:
            return
        self._is_forward_updated = True
        update_scales(self._modules(), is_forward=True)
        for leaf in _pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                leaf.register_hook(self._on_output_gradient)  # type: ignore[no-untyped-call]

    def _on_output_gradient(self, gradient: torch.Tensor) -> None:
        self.begin_backward()

    def begin_backward(self) -> None:
        """Called inside the autograd engine by any part of this region, any number of times."""
        _local.backward = self
        if not self._is_backward_under_way:
            self._is_backward_under_way = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)

    def _finish_backward(self) -> None:
        self._is_backward_under_way = False
        if getattr(_local, "backward", None) is self:
            _local.backward = None
        modules = self._modules()
        if not self._is_forward_updated:
            # The region began without gradients but is differentiated: a reentrant checkpoint around all of it.
            self._is_forward_updated = True
            update_scales(modules, is_forward=True)
        update_scales(modules, is_forward=False)

    def _modules(self) -> list[Fp8Linear]:
        """All of the owner's modules, run or not, in module order (the same on every rank), then others that ran."""
        owner = self._owner() if self._owner is not None else None
        own = fp8_modules(owner) if owner is not None else []
        known = set(own)
        return own + [module for module in self._calls if module not in known]


_local = threading.local()
_newest: weakref.WeakKeyDictionary[Fp8Linear, Region] = weakref.WeakKeyDictionary()


def fp8_modules(model: torch.nn.Module) -> list[Fp8Linear]:
    """The converted layers of a model, each once, in `modules()` order."""
    from fp8watch.emulation.linear import Fp8Linear

    checks.module("model", model)
    return [module for module in model.modules() if isinstance(module, Fp8Linear)]


def is_in_backward() -> bool:
    """Whether this thread is executing a backward pass; then a forward is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def open_region() -> Region | None:
    """The region of the forward that is running on this thread."""
    return getattr(_local, "open", None)


def recomputed_region(module: Fp8Linear) -> Region | None:
    """The region whose backward is recomputing this module; None if the module never ran in one."""
    active: Region | None = getattr(_local, "backward", None)
    if active is not None and active.has_run(module):
        return active
    region = _newest.get(module)
    if region is not None:
        region.begin_backward()
    return region


def enter(module: torch.nn.Module, args: Any) -> None:
    """Forward pre-hook of a converted root."""
    if is_in_backward():
        return
    region = open_region()
    caller = sys._getframe(1)
    if region is not None and (region.frame is None or _is_on_stack(region.frame, caller)):
        region.depth += 1
        return
    # No region is open, or only one left behind by a KeyboardInterrupt, which runs no forward hooks.
    _local.open = Region(module, frame=caller)


def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
    """Forward hook of a converted root, also called when its forward raised."""
    region = open_region()
    if region is None or is_in_backward():
        return
    region.depth -= 1
    if region.depth > 0:
        return
    _local.open = None
    region.frame = None
    if output is not None or sys.exc_info()[0] is None:
        region.finish_forward(output)


def _is_on_stack(frame: FrameType, top: FrameType) -> bool:
    current: FrameType | None = top
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None


@contextlib.contextmanager
def autocast(owner: torch.nn.Module | None = None) -> Iterator[None]:
    """Context for one forward, for code that calls parts of a converted model and not the model itself.

    `owner`: the model whose modules all take part in the update, run or not; needed when amax is reduced over ranks
    that may run different modules. It has no effect inside another region or during recomputation. Nothing is updated
    if the body raises. Raises `TypeError` for an owner that is not a model.
    """
    if owner is not None:
        checks.module("owner", owner)
    if open_region() is not None or is_in_backward():
        yield
        return
    region = _local.open = Region(owner)
    try:
        yield
    finally:
        _local.open = None
    region.finish_forward(None)
