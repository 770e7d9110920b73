"""`repair_scale`: purge poisoned amax windows and set the scales that clean amax demands."""

from __future__ import annotations

import math
from typing import Any

from fp8watch.actions import params as read
from fp8watch.actions.base import Applied, ReadBack
from fp8watch.actions.precision import NOTHING_HERE, TENSORS, Fp8Action, scale_names
from fp8watch.errors import ActionError


class RepairScale(Fp8Action):
    """Parameters: `tensors` (`module:tensor`) or `layers` (all tensors of these modules); neither: all."""

    name = "repair_scale"

    def apply(self, step: int, params: dict[str, Any]) -> Applied:
        """See `Action`."""
        if self._is_elsewhere():
            return self._nothing_here(step, params)
        controls, elsewhere = self._controls(), self._context.elsewhere
        readable = scale_names(controls)
        tensors = readable
        if params.get("tensors"):
            others = [f"{module}:{tensor}" for module in elsewhere for tensor in TENSORS]
            tensors = read.names(params, "tensors", readable, others)
        elif params.get("layers"):
            layers = read.names(params, "layers", controls.modules(), elsewhere)
            tensors = [n for layer in layers for t in TENSORS if (n := f"{layer}:{t}") in readable]
        if not tensors and elsewhere:
            return self._nothing_here(step, params)
        before = controls.scales(tensors)
        repaired = controls.repair_scales(tensors)
        if not repaired:
            raise ActionError("no clean amax is known for any of these tensors")
        return Applied(
            step=step,
            params=params,
            before={"scales": before},
            expected={"scales": repaired, "after_update": self._context.lr.updates},
        )

    def read_back(self, applied: Applied) -> ReadBack:
        """One step later the scales are those set, or have moved on from there, but not back to where they were."""
        if "elsewhere" in applied.expected:
            return NOTHING_HERE
        wanted, before = applied.expected["scales"], applied.before["scales"]
        now = self._controls().scales(list(wanted))
        bad = [name for name, scale in now.items() if not (math.isfinite(scale) and scale > 0)]
        observed = {"repaired": len(wanted), "scales": dict(list(now.items())[:8])}
        if bad:
            return ReadBack(ok=False, observed=observed, detail=f"not a usable scale: {', '.join(bad[:5])}")
        if not self._has_updated(applied):
            return ReadBack(ok=None, observed=observed, detail="no scale update has passed since")
        stuck = [name for name, scale in now.items() if _is_nearer(scale, before[name], wanted[name])]
        if stuck:
            return ReadBack(ok=False, observed=observed, detail=f"back where they were: {', '.join(stuck[:5])}")
        return ReadBack(ok=True, observed=observed)

    def revert(self, applied: Applied) -> None:
        """There is nothing to go back to: the scales before were wrong."""
        raise ActionError("a repaired scale is not made wrong again")


def _is_nearer(scale: float, before: float, wanted: float) -> bool:
    """Whether a scale lies nearer to where it was than to what was set, where the two differ by over a bit."""
    if not (math.isfinite(before) and before > 0):
        return False
    old, new, now = math.log2(before), math.log2(wanted), math.log2(scale)
    return abs(new - old) > 1.0 and abs(now - old) < abs(now - new)
