"""`repair_scale`: purge corrupted amax histories and set the scales that follow from the clean amax."""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist

from fp8watch.actions import params as read
from fp8watch.actions.base import Applied, ReadBack
from fp8watch.actions.precision import NOTHING_HERE, TENSORS, Fp8Action, scale_names
from fp8watch.actions.undo import Undo, all_or_nothing
from fp8watch.errors import ActionError

NO_CLEAN_AMAX = "no clean amax is known for any of these tensors"
SLACK_BITS = 2.0
"""Bits (log2) by which a scale may exceed the one for the newest amax, because amax may grow between updates."""


class RepairScale(Fp8Action):
    """Parameters: `tensors` (`module:tensor`) or `layers` (all tensors of these modules). Default: all tensors."""

    name = "repair_scale"

    @all_or_nothing
    def apply(self, step: int, params: dict[str, Any], undo: Undo) -> Applied:
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
        self._keep_scales(controls, undo)
        repaired = controls.repair_scales(tensors)
        if not repaired and not _has_peers():
            raise ActionError(NO_CLEAN_AMAX)
        return Applied(
            step=step,
            params=params,
            before={"scales": before},
            expected={"scales": repaired, "after_update": self._context.lr.updates},
        )

    def read_back(self, applied: Applied) -> ReadBack:
        """Whether, one step later, the scales are usable, have not gone back to the old values, and fit the amax."""
        if "elsewhere" in applied.expected:
            return NOTHING_HERE
        wanted, before = applied.expected["scales"], applied.before["scales"]
        if not wanted:
            return ReadBack(ok=False, observed={"repaired": 0}, detail=NO_CLEAN_AMAX)
        now = self._controls().scales(list(wanted))
        bad = [name for name, scale in now.items() if not (math.isfinite(scale) and scale > 0)]
        observed = {"repaired": len(wanted), "scales": dict(list(now.items())[:8])}
        if bad:
            return ReadBack(ok=False, observed=observed, detail=f"not a usable scale: {', '.join(bad[:5])}")
        if not self._has_updated(applied):
            return ReadBack(ok=None, observed=observed, detail="no scale update has passed since")
        stuck = [name for name, scale in now.items() if _has_gone_back(scale, before[name], wanted[name])]
        if stuck:
            return ReadBack(ok=False, observed=observed, detail=f"back where they were: {', '.join(stuck[:5])}")
        highest = self._controls().highest_scales(list(wanted))
        clips = [name for name, most in highest.items() if now[name] > most * 2.0**SLACK_BITS]
        if clips:
            return ReadBack(ok=False, observed=observed, detail=f"still clips its amax: {', '.join(clips[:5])}")
        return ReadBack(ok=True, observed=observed)

    def revert(self, applied: Applied) -> None:
        """Always raises: the scales before were wrong."""
        raise ActionError("a scale repair cannot be undone: the scales before were wrong")

    def read_back_revert(self, applied: Applied) -> ReadBack:
        """Never called: `revert` always raises."""
        return ReadBack(ok=False, detail="a scale repair cannot be undone")


def _has_peers() -> bool:
    """Whether other ranks repair their scales at the same time. They cannot undo it, so a rank without anything to
    repair does not raise, but fails its read-back."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _has_gone_back(scale: float, before: float, wanted: float) -> bool:
    """Whether a scale is nearer (in log2) to its old value than to the new one, if these differ by more than a bit."""
    if not (math.isfinite(before) and before > 0):
        return False
    old, new, now = math.log2(before), math.log2(wanted), math.log2(scale)
    return abs(new - old) > 1.0 and abs(now - old) < abs(now - new)
