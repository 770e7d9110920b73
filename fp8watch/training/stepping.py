"""Around `optimizer.step`: where the LR factor, the skip of a bad update and the size of the update meet.

`optimizer.step` is wrapped once, as a bound method on the instance, so that learning-rate schedulers (which wrap
it themselves, before or after us), `GradScaler.step` and closures work as before. After `detach` the wrapper is
gone, or passes through when somebody has wrapped it in turn.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any, Protocol

import torch

from fp8watch.foreign import attribute
from fp8watch.training.untraced import get_frame_callback, run_eagerly, set_frame_callback


class StepObserver(Protocol):
    """What wants to know about an optimizer step. None of these raises."""

    def before_update(self, *, has_closure: bool) -> bool:
        """Gradients are final unless a closure makes them. True: leave this update out."""

    def enter_update(self) -> None:
        """Put in force what shall hold during the update only."""

    def leave_update(self) -> None:
        """Take it back, whatever happened."""

    def after_update(self, *, has_closure: bool) -> None:
        """The update is done."""


class OptimizerTap:
    """Calls a `StepObserver` around every step of one optimizer, until `detach`."""

    def __init__(self, optimizer: torch.optim.Optimizer, observer: StepObserver) -> None:
        self._optimizer = optimizer
        self._observer = observer
        self._is_active = True
        self._had_instance_step = "step" in vars(optimizer)
        self._original: Callable[..., Any] = optimizer.step
        self._installed = self._wrapper()
        optimizer.step = self._installed  # type: ignore[method-assign]

    def _wrapper(self) -> types.MethodType:
        original, observer = self._original, self._observer
        # Wrapping what `__func__` names keeps the signature that GradScaler inspects, and the mark by which
        # LRScheduler knows its own wrapper.
        source = attribute(original, "__func__") or original

        def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not self._is_active or optimizer is not self._optimizer:
                return original(*args, **kwargs)
            has_closure = bool(args and callable(args[0])) or callable(kwargs.get("closure"))
            tracer = get_frame_callback()
            if tracer is not None:
                set_frame_callback(None)
            try:
                if observer.before_update(has_closure=has_closure):
                    # LRScheduler warns when it is stepped before the optimizer ever was.
                    optimizer._opt_called = True  # type: ignore[attr-defined]
                    return None
                observer.enter_update()
                if tracer is not None:
                    set_frame_callback(tracer)
                try:
                    result = original(*args, **kwargs)
                finally:
                    if tracer is not None:
                        set_frame_callback(None)
                    observer.leave_update()
                observer.after_update(has_closure=has_closure)
                return result
            finally:
                if tracer is not None:
                    set_frame_callback(tracer)

        with contextlib.suppress(Exception):  # what somebody put in the place of `step` may raise over being looked at
            functools.update_wrapper(step, source)
        run_eagerly(step)
        return types.MethodType(step, self._optimizer)

    def detach(self) -> None:
        """Take the wrapper off, or make it pass through when another one lies over it."""
        self._is_active = False
        if vars(self._optimizer).get("step") is not self._installed:
            return
        if self._had_instance_step:
            self._optimizer.step = self._original  # type: ignore[method-assign]
        else:
            del self._optimizer.step
