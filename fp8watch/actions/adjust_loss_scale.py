"""`adjust_loss_scale`: change the loss scale of the gradient scaler."""

from __future__ import annotations

from typing import Any

import torch

from fp8watch.actions import params as read
from fp8watch.actions.base import Applied, ReadBack
from fp8watch.actions.context import ActionContext
from fp8watch.actions.undo import Undo, all_or_nothing
from fp8watch.errors import ActionError


class AdjustLossScale:
    """Multiplies the loss scale by `factor`, or sets it to `value`."""

    name = "adjust_loss_scale"

    def __init__(self, context: ActionContext) -> None:
        self._context = context

    def unavailable(self) -> str | None:
        """See `Action`."""
        scaler = self._context.scaler
        if scaler is None:
            return "no loss scaler is in use: give attach scaler="
        if not (hasattr(scaler, "get_scale") and hasattr(scaler, "update")):
            return f"{type(scaler).__name__} is no GradScaler"
        return None

    @all_or_nothing
    def apply(self, step: int, params: dict[str, Any], undo: Undo) -> Applied:
        """See `Action`."""
        scaler = self._scaler()
        before = float(scaler.get_scale())
        if params.get("value") is not None:
            scale = read.number(params, "value", above=0.0)
        else:
            scale = before * read.number(params, "factor", above=0.0)
        if not 2.0**-100 < scale < 2.0**100:
            raise ActionError(f"a loss scale of {scale:g} is out of float32's useful range")
        held = self._held(scaler)
        undo.add("the loss scale", lambda: held.fill_(before))
        self._set(scaler, scale)
        return Applied(step=step, params=params, before={"loss_scale": before}, expected={"loss_scale": scale})

    def read_back(self, applied: Applied) -> ReadBack:
        """Whether the scaler has the new value. Called at once, before the scaler's own growth or back-off."""
        return self._compare(applied.expected["loss_scale"])

    def _compare(self, wanted: float) -> ReadBack:
        scale = float(self._scaler().get_scale())
        is_set = abs(scale - wanted) <= 1e-6 * scale
        return ReadBack(
            ok=is_set, observed={"loss_scale": scale}, detail="" if is_set else "the scaler has another value"
        )

    def revert(self, applied: Applied) -> None:
        """Restore the previous value."""
        self._set(self._scaler(), applied.before["loss_scale"])

    def read_back_revert(self, applied: Applied) -> ReadBack:
        """Whether the scaler has the previous value. Called at once, like `read_back`."""
        return self._compare(applied.before["loss_scale"])

    def _scaler(self) -> Any:
        if reason := self.unavailable():
            raise ActionError(reason)
        return self._context.scaler

    @classmethod
    def _set(cls, scaler: Any, scale: float) -> None:
        cls._held(scaler).fill_(scale)

    @staticmethod
    def _held(scaler: Any) -> torch.Tensor:
        """The scaler's own tensor, changed in place."""
        # Not `scaler.update(scale)`, which forgets which optimizers have been stepped: if the loop calls `watch.step`
        # between `scaler.step` and `scaler.update`, its own update would raise.
        held = getattr(scaler, "_scale", None)
        if not isinstance(held, torch.Tensor):
            raise ActionError("the scaler has not been used yet: it has no scale to change")
        return held
