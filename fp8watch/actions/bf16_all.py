"""`bf16_all`: run every FP8 module in BF16."""

from __future__ import annotations

from typing import Any

from fp8watch.actions.base import Applied
from fp8watch.actions.precision import HighPrecision
from fp8watch.actions.undo import Undo, all_or_nothing


class Bf16All(HighPrecision):
    """No parameters."""

    name = "bf16_all"

    @all_or_nothing
    def apply(self, step: int, params: dict[str, Any], undo: Undo) -> Applied:
        """See `Action`."""
        given = {key: value for key, value in params.items() if key != "layers"}
        return self._hold(step, given, self._modules(), undo)
