"""`tighten_clip`: a lower limit on the gradient norm than the user's, against bursts of the gradient."""

from __future__ import annotations

import math
import statistics
from typing import Any

from fp8watch.actions import params as read
from fp8watch.actions.base import Applied, ReadBack
from fp8watch.actions.clip_control import wants_closure
from fp8watch.actions.context import ActionContext
from fp8watch.actions.in_force import InForce
from fp8watch.actions.skip_guard import CLOSURE
from fp8watch.actions.tensor_clip import TensorClip
from fp8watch.actions.undo import Undo, all_or_nothing
from fp8watch.checkpoints.sharding import is_sharded
from fp8watch.errors import ActionError

SINGLE = "tighten_clip per tensor"
"""The reason under which the per-tensor limit arms the skip guard."""
NON_FINITE_WINDOW = 4
"""Recent norms that have to be finite, because clipping by a non-finite norm turns gradients into 0 or NaN."""


class TightenClip:
    """Sets the limit to `max_norm`, or to `factor` times the limit in force (without one: the median recent norm). With
    `per_tensor`, limits each gradient tensor to that many times the mean of its own recent norms instead.

    While the limit is in force, an update whose norm is not finite is skipped.
    """

    name = "tighten_clip"

    def __init__(self, context: ActionContext) -> None:
        self._clip = context.clip
        self._skip = context.skip
        self._optimizer = context.optimizer
        self._limits: InForce[float] = InForce()
        """Limits of all actions in force; the lowest applies."""

    def _why_not_single(self) -> str | None:
        if any(is_sharded(p) for group in self._optimizer.param_groups for p in group["params"]):
            return "per_tensor: the gradients are sharded, and each norm would take a collective call of its own"
        return None

    def unavailable(self) -> str | None:
        """See `Action`."""
        if wants_closure(self._optimizer) and self._clip.user_limit is None:
            return f"{CLOSURE}, and the loop does not clip there with watch.clip_grad_norm_"
        failure = self._clip.failure
        return None if failure is None else f"clipping before the optimizer step failed: {failure}"

    @all_or_nothing
    def apply(self, step: int, params: dict[str, Any], undo: Undo) -> Applied:
        """See `Action`. Raises `ActionError` while a recent norm is not finite, because no limit helps then."""
        if reason := self.unavailable():
            raise ActionError(reason)
        norms = self._clip.recent_norms()
        if any(not math.isfinite(norm) for norm in norms[-NON_FINITE_WINDOW:]):
            raise ActionError("the gradient norm is not finite; clipping turns such gradients into 0 or NaN")
        if params.get("per_tensor") is not None:
            return self._apply_to_tensors(step, params, undo)
        before = self._clip.limit
        in_force = min((limit for limit in (before, self._clip.user_limit) if limit is not None), default=None)
        limit = self._limit(params, norms, in_force)
        if limit <= 0.0:
            raise ActionError("a limit of 0 stops training; halt instead")
        if in_force is not None and limit >= in_force:
            raise ActionError(f"a limit of {limit:g} is not below the one in force, {in_force:g}")
        undo.add("the clip limit", self._hold_lowest)
        undo.add("the limits in force", self._limits.restorer())
        number = self._limits.add(limit)
        self._hold_lowest()
        return Applied(
            step=step,
            params=params,
            before={"our_limit": before, "limit": in_force},
            expected={"limit": limit, "number": number, "after_clip": self._clip.calls},
        )

    def _lowest(self) -> float | None:
        return min(self._limits.values, default=None)

    def _hold_lowest(self) -> None:
        self._clip.set_limit(self._lowest())
        if self._limits:
            self._skip.arm(self.name)
        else:
            self._skip.disarm(self.name)

    def _apply_to_tensors(self, step: int, params: dict[str, Any], undo: Undo) -> Applied:
        ratio = read.number(params, "per_tensor", at_least=1.0, at_most=100.0)
        if params.get("max_norm") is not None or params.get("factor") is not None:
            raise ActionError("per_tensor excludes max_norm and factor: a limit of the whole norm is a separate action")
        if reason := self._why_not_single():
            raise ActionError(reason)
        if self._clip.tensors is not None:
            raise ActionError(f"single tensors are already limited, to {self._clip.tensors.ratio:g} times their norms")
        undo.add("the limits of single tensors", self._drop_tensors)
        self._clip.tensors = mine = TensorClip(ratio)
        self._skip.arm(SINGLE)
        return Applied(
            step=step, params=params, before={"per_tensor": None},
            expected={"per_tensor": ratio, "begun": mine.number},
        )  # fmt: skip

    def _read_back_tensors(self, applied: Applied) -> ReadBack:
        mine = self._clip.tensors
        if self._clip.failure is not None:
            return ReadBack(ok=False, detail=self.unavailable() or "")
        if mine is None or mine.number != applied.expected["begun"]:
            return ReadBack(ok=False, detail="the limit of single tensors is no longer in force")
        if mine.updates < 2 or mine.worst is None or mine.num_clipped is None:
            return ReadBack(ok=None, detail="two updates are needed: the first sets the limits of the second")
        worst = float(mine.worst)
        observed = {"per_tensor": mine.ratio, "largest_over_limit": worst, "clipped_tensors": int(mine.num_clipped)}
        if worst > 1.0 + 1e-2:
            return ReadBack(ok=False, observed=observed, detail="a gradient's norm is above its limit after clipping")
        return ReadBack(ok=True, observed=observed)

    @staticmethod
    def _limit(params: dict[str, Any], norms: list[float], in_force: float | None) -> float:
        if params.get("max_norm") is not None:
            return read.number(params, "max_norm", at_least=0.0)
        factor = read.number(params, "factor", above=0.0)
        if in_force is not None and math.isfinite(in_force):
            return factor * in_force
        if not norms:
            raise ActionError("no limit and no gradient norm is known yet; give max_norm")
        return factor * statistics.median(norms)

    def read_back(self, applied: Applied) -> ReadBack:
        """Whether the last clip used the limit, and the norm over all gradients that the optimizer got is below it."""
        if "per_tensor" in applied.expected:
            return self._read_back_tensors(applied)
        limit = applied.expected["limit"]
        if self._clip.failure is not None:
            return ReadBack(ok=False, detail=self.unavailable() or "")
        last = self._clip.last
        if self._clip.calls <= applied.expected["after_clip"] or last is None:
            return ReadBack(ok=None, detail="no gradient was clipped since")
        after = self._clip.norm_after
        observed: dict[str, Any] = {"limit": last.limit, "norm_before": float(last.norm)}
        if after is None:
            return ReadBack(
                ok=False, observed=observed, detail="no optimizer step has measured the norm after clipping"
            )
        observed["norm_after"] = float(after)
        observed["clipped_ratio"] = self._clip.clipped_ratio()
        if last.limit is None or last.limit > limit * (1 + 1e-6):
            return ReadBack(ok=False, observed=observed, detail=f"the last clip used {last.limit}, not {limit:g}")
        if math.isfinite(float(last.norm)) and not float(after) <= limit * (1 + 1e-3):
            return ReadBack(ok=False, observed=observed, detail=f"the norm after clipping is above {limit:g}")
        return ReadBack(ok=True, observed=observed)

    def revert(self, applied: Applied) -> None:
        """Remove this limit. The lowest limit of the other actions remains."""
        if "per_tensor" in applied.expected:
            if self._clip.tensors is not None and self._clip.tensors.number == applied.expected["begun"]:
                self._drop_tensors()
            return
        if self._limits.remove(applied.expected["number"]):
            self._hold_lowest()

    def _drop_tensors(self) -> None:
        self._clip.tensors = None
        self._skip.disarm(SINGLE)

    def read_back_revert(self, applied: Applied) -> ReadBack:
        """Whether the control no longer has this limit."""
        if "per_tensor" in applied.expected:
            mine = self._clip.tensors
            is_gone = mine is None or mine.number != applied.expected["begun"]
            return ReadBack(ok=is_gone, detail="" if is_gone else "single tensors are still limited")
        limit = applied.expected["limit"]
        observed = {"limit": self._clip.limit}
        if self._clip.limit != self._lowest() or applied.expected["number"] in self._limits:
            return ReadBack(ok=False, observed=observed, detail=f"the limit of {limit:g} is still in force")
        return ReadBack(ok=True, observed=observed)
