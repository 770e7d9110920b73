"""`adjust_loss_scale`: the scaler's factor between loss and gradients."""

from __future__ import annotations

from typing import Any

from fp8watch.actions import params as read
from fp8watch.actions.base import Applied, ReadBack
from fp8watch.actions.context import ActionContext
from fp8watch.errors import ActionError


class AdjustLossScale:
    """Scale times `factor`, or set to `value`."""

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

    def apply(self, step: int, params: dict[str, Any]) -> Applied:
        """See `Action`."""
        scaler = self._scaler()
        before = float(scaler.get_scale())
        if params.get("value") is not None:
            scale = read.number(params, "value", above=0.0)
        else:
            scale = before * read.number(params, "factor", above=0.0)
        if not 2.0**-100 < scale < 2.0**100:
            raise ActionError(f"a loss scale of {scale:g} is out of float32's useful range")
        self._set(scaler, scale)
        return Applied(step=step, params=params, before={"loss_scale": before}, expected={"loss_scale": scale})

    def read_back(self, applied: Applied) -> ReadBack:
        """The scaler's value. Its own growth or back-off later on is not ours to judge: asked right away."""
        scale = float(self._scaler().get_scale())
        is_set = abs(scale - applied.expected["loss_scale"]) <= 1e-6 * scale
        return ReadBack(ok=is_set, observed={"loss_scale": scale}, detail="" if is_set else "the scaler has another")

    def revert(self, applied: Applied) -> None:
        """Back to the value before."""
        self._set(self._scaler(), applied.before["loss_scale"])

    def _scaler(self) -> Any:
        if reason := self.unavailable():
            raise ActionError(reason)
        return self._context.scaler

    @staticmethod
    def _set(scaler: Any, scale: float) -> None:
        try:
            scaler.update(scale)
        except AssertionError as error:
            # Before the first scaled loss the scaler has no tensor to fill.
            raise ActionError(f"the scaler has not been used yet: {error}") from error
