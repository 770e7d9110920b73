"""`bf16_layers`: run the named modules in BF16."""

from __future__ import annotations

from typing import Any

from fp8watch.actions import params as read
from fp8watch.actions.base import Applied
from fp8watch.actions.precision import HighPrecision
from fp8watch.actions.undo import Undo, all_or_nothing


class Bf16Layers(HighPrecision):
    """Parameter: `layers`, a list of qualified module names."""

    name = "bf16_layers"

    @all_or_nothing
    def apply(self, step: int, params: dict[str, Any], undo: Undo) -> Applied:
        """See `Action`."""
        return self._hold(step, params, read.names(params, "layers", self._modules(), self._context.elsewhere), undo)
