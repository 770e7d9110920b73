"""`raise_margin`: more head-room between amax and the format's largest value."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

from fp8watch.actions import params as read
from fp8watch.actions.base import Applied, ReadBack
from fp8watch.actions.context import ActionContext
from fp8watch.actions.precision import NOTHING_HERE, Fp8Action, scale_names
from fp8watch.actions.undo import Undo, all_or_nothing, whole
from fp8watch.errors import ActionError
from fp8watch.formats import MAX_MARGIN


class RaiseMargin(Fp8Action):
    """Raises the margin of the live recipe by `bits` (powers of two)."""

    name = "raise_margin"

    def __init__(self, context: ActionContext) -> None:
        super().__init__(context)
        self._numbers = itertools.count(1)
        self._after_revert: dict[int, float] = {}
        """Number of a reverted action -> the margin that its revert has set."""

    def unavailable(self) -> str | None:
        """See `Action`. Unavailable also when the recipe has no margin."""
        reason = super().unavailable()
        if reason is None and not self._is_elsewhere() and self._controls_margin() is None:
            return "the recipe in use has no margin"
        return reason

    def _controls_margin(self) -> float | None:
        return None if self._context.controls is None else self._context.controls.margin()

    @all_or_nothing
    def apply(self, step: int, params: dict[str, Any], undo: Undo) -> Applied:
        """See `Action`."""
        bits = read.number(params, "bits", 1.0, above=0.0, at_most=8.0)
        if self._is_elsewhere():
            return self._nothing_here(step, params)
        controls = self._controls()
        before = controls.margin()
        if before is None:
            raise ActionError("the recipe in use has no margin")
        if before + bits > MAX_MARGIN:
            raise ActionError(f"the margin is {before:g}; with {bits:g} more there would be no range left to cast to")
        tensors = scale_names(controls)
        scales = controls.scales(tensors)
        undo.add("the margin", lambda: controls.set_margin(before))
        controls.set_margin(before + bits)
        return Applied(
            step=step,
            params=params,
            before={"margin": before, "scales": scales},
            expected={
                "margin": before + bits, "bits": bits, "number": next(self._numbers),
                "after_update": self._context.lr.updates,
            },
        )  # fmt: skip

    def read_back(self, applied: Applied) -> ReadBack:
        """Whether the recipe has the new margin and the scales in force have followed it.

        A setting that the scale update does not read is the classic silent no-op. In a healthy run scales move by a
        fraction of a power of two per step, and not all in one direction, so their median shows the change.
        """
        if "elsewhere" in applied.expected:
            return NOTHING_HERE
        controls = self._controls()
        margin, wanted, bits = controls.margin(), applied.expected["margin"], applied.expected["bits"]
        if margin is None or not math.isclose(margin, wanted):
            return ReadBack(ok=False, observed={"margin": margin}, detail=f"the recipe has margin {margin}")
        if not self._has_updated(applied):
            return ReadBack(ok=None, observed={"margin": margin}, detail="no scale update has passed since")
        before = applied.before["scales"]
        now = controls.scales(list(before))
        moved = [math.log2(before[name] / scale) for name, scale in now.items() if scale > 0 and before[name] > 0]
        observed = {"margin": margin, "scales_lowered_by_bits": statistics.median(moved) if moved else None}
        if not moved:
            return ReadBack(ok=False, observed=observed, detail="no scale can be read")
        is_followed = abs(statistics.median(moved) - bits) < max(0.5 * bits, 0.25)
        detail = "" if is_followed else "the scales in force have not followed"
        return ReadBack(ok=is_followed, observed=observed, detail=detail)

    def revert(self, applied: Applied) -> None:
        """Subtract the bits again. Bits that other actions have added since stay."""
        if "elsewhere" in applied.expected:
            return
        controls = self._controls()
        margin = controls.margin()
        if margin is None:
            raise ActionError("the recipe in use has no margin any more")
        lower = margin - applied.expected["bits"]
        with whole(self.name) as undo:
            undo.add("the margin", lambda: controls.set_margin(margin))
            controls.set_margin(lower)
        self._after_revert[applied.expected["number"]] = lower

    def read_back_revert(self, applied: Applied) -> ReadBack:
        """Whether the recipe has the lower margin."""
        if "elsewhere" in applied.expected:
            return NOTHING_HERE
        margin, wanted = self._controls().margin(), self._after_revert.get(applied.expected["number"])
        is_back = margin is not None and wanted is not None and math.isclose(margin, wanted, abs_tol=1e-9)
        return ReadBack(ok=is_back, observed={"margin": margin}, detail="" if is_back else f"the margin is {margin}")
