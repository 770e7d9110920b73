"""Skips optimizer updates whose gradients are not finite.

While armed, the guard decides before each `optimizer.step`. A skipped update changes neither parameters nor moments nor
the optimizer's step counter. For fused optimizers on an accelerator the device decides (`found_inf`, the mechanism of
`torch.amp.GradScaler`), without synchronisation. For others the guard reads one scalar per step while it is armed,
which is free on a CPU. After `max_in_a_row` skipped updates in a row, the next one goes through and is reported
(`is_limit_reached`), because a run that skips forever makes no progress and hides the fault.

In a run of several ranks, all ranks skip an update or none does: each asks the others (`ask_peers`) before the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8watch.actions.clip_control import ClipControl, gradients_of, local_values, total_norm, wants_closure
from fp8watch.capture.gradients import has_scaler

MAX_IN_A_ROW = 3
CLOSURE = "optimizer.step wants a closure, which makes the gradients inside it"


class SkipGuard:
    """Decides, update by update, whether the optimizer may step.

    Use in the optimizer wrapper: clip first, then `if guard.before_step(): <do not step>`, and in either case
    `guard.after_step()` in a `finally`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        clip: ClipControl | None = None,
        scaler: Any | None = None,
        *,
        max_in_a_row: int = MAX_IN_A_ROW,
        on_device: bool | None = None,
    ) -> None:
        """`on_device` None: decide on the device for fused optimizers on an accelerator, else on the host."""
        self._optimizer = optimizer
        self._clip = clip
        self._scaler = scaler
        self.max_in_a_row = max_in_a_row
        self._on_device = on_device
        self._reasons: set[str] = set()
        self._in_a_row: int | torch.Tensor = 0
        self._skipped: bool | torch.Tensor = False
        self._total: int | torch.Tensor = 0
        self._consulted = 0
        self._is_limit_reached = False
        self._put_found_inf = False
        self._was_asked = False
        self._failure: str | None = None
        self.ask_peers: Callable[[bool, bool], bool] | None = None
        """In a run of several ranks: (this rank's gradients are bad, it may act) -> whether every rank skips the
        update. Called by all ranks at each update while the guard is armed."""

    def unavailable(self) -> str | None:
        """Why the guard cannot be used, or None if it can."""
        if has_scaler(self._scaler):
            return "the GradScaler already skips updates whose gradients are not finite"
        if wants_closure(self._optimizer):
            return CLOSURE
        return f"the guard failed at the last update: {self._failure}" if self._failure is not None else None

    @property
    def failure(self) -> str | None:
        """Why the guard could not decide at the last update; None: it could. After several failures in a row the
        optimizer wrapper stops asking."""
        return self._failure

    def arm(self, reason: str) -> None:
        """Guard from the next update on. Several reasons may be active at once."""
        self._reasons.add(reason)
        if self._clip is not None:
            self._clip.keeps_covers = True

    def disarm(self, reason: str) -> None:
        """Drop a reason; without any the guard is idle."""
        self._reasons.discard(reason)
        if self._clip is not None:
            self._clip.keeps_covers = bool(self._reasons)

    @property
    def reasons(self) -> frozenset[str]:
        """The reasons that are active."""
        return frozenset(self._reasons)

    @property
    def is_armed(self) -> bool:
        """Whether there is any reason to guard."""
        return bool(self._reasons)

    @property
    def is_at_rest(self) -> bool:
        """Whether `before_step` has nothing to do: not armed, and nothing left of the last update to reset."""
        return not (self._reasons or self._is_limit_reached or self._failure is not None or self._skipped is not False)

    @property
    def consulted(self) -> int:
        """Number of updates that the guard decided about while armed."""
        return self._consulted

    @property
    def last_skipped(self) -> bool | torch.Tensor:
        """Whether the last update was skipped: a bool, or a 0-d device tensor (1.0: skipped)."""
        return self._skipped

    @property
    def total(self) -> int | torch.Tensor:
        """Number of updates skipped so far (a 0-d device tensor where the device decides)."""
        return self._total

    @property
    def is_limit_reached(self) -> bool:
        """Host path only: whether the last update went through although its gradients were not finite, because too
        many in a row had been skipped."""
        return self._is_limit_reached

    def before_step(self, *, may_act: bool = True) -> bool:
        """True: skip this update. Always False where the device decides: there the kernel skips it.

        `may_act` False: nothing is skipped, but the other ranks are still answered.
        """
        self._was_asked = True
        self._skipped = False
        self._is_limit_reached = False
        self._failure = None
        try:
            is_skipped = bool(self._reasons) and self._decide(may_act=may_act)
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise
        self._consulted += bool(self._reasons)
        return is_skipped

    def _decide(self, *, may_act: bool) -> bool:
        if getattr(self._optimizer, "found_inf", None) is not None:
            return False  # a GradScaler has already decided
        if self.ask_peers is not None:
            is_bad = self._ask_peers(self.ask_peers, may_act=may_act)
        else:
            flag = self._not_finite()
            if flag is None:
                return False
            if self._decides_on_device(flag):
                self._decide_on_device(flag)
                return False
            is_bad = bool(flag)
        in_a_row = int(self._in_a_row)
        if not is_bad:
            self._in_a_row = 0
            return False
        if in_a_row >= self.max_in_a_row:
            self._is_limit_reached = True
            return False
        self._in_a_row = in_a_row + 1
        self._total = self._total + 1
        self._skipped = True
        return True

    def _ask_peers(self, ask: Callable[[bool, bool], bool], *, may_act: bool) -> bool:
        """Reads the flag on the host even for fused optimizers: the other ranks are asked before the kernel starts."""
        is_bad = False
        try:
            flag = self._not_finite()
            is_bad = flag is not None and bool(flag)
        except Exception as error:  # not raised: this rank would stop taking part while the others wait for it
            self._failure = f"{type(error).__name__}: {error}"
        return ask(is_bad, may_act)

    def after_step(self) -> None:
        """Remove what `before_step` put into the optimizer. Also called when `before_step` was not."""
        if not self._was_asked:
            self._skipped = False
        self._was_asked = False
        if self._put_found_inf:
            self._put_found_inf = False
            for name in ("found_inf", "grad_scale"):
                if hasattr(self._optimizer, name):
                    delattr(self._optimizer, name)

    def _not_finite(self) -> torch.Tensor | None:
        """Whether any gradient is not finite: 0-d bool on the gradients' device; None without gradients. Does not
        synchronise."""
        covers = self._clip.take_covers() if self._clip is not None else []
        gradients = gradients_of(self._optimizer)
        if not gradients:
            return None
        covers = [cover for cover in covers if cover.touched(gradients)]
        # A clip with a non-finite norm has already turned all of its gradients into 0 or NaN.
        norms = [cover.norm for cover in covers]
        # Norms of order 0 or below do not show every Inf and NaN (order 0 counts elements).
        telling = [cover for cover in covers if cover.norm_type > 0.0]
        if not all(any(cover.holds(gradient) for cover in telling) for gradient in gradients):
            # This rank's shards only. The norm over all shards is a collective call, but not every rank need reach this
            # line, which depends on how its gradients were clipped. All ranks are asked for their verdicts anyway.
            values = [value for value in map(local_values, gradients) if value.numel()]
            if values:
                norms.append(total_norm(values, float("inf")))
        if not norms:
            return None
        flag = ~torch.isfinite(norms[0])
        for norm in norms[1:]:
            flag = flag | ~torch.isfinite(norm).to(flag.device)
        return flag

    def _decides_on_device(self, flag: torch.Tensor) -> bool:
        if self._on_device is False or (self._on_device is None and flag.device.type == "cpu"):
            return False
        groups = self._optimizer.param_groups
        if not getattr(self._optimizer, "_step_supports_amp_scaling", False):
            return False
        if not all(group.get("fused") for group in groups):
            return False
        # Fused SGD creates its momentum buffers uninitialised in the first step. If the kernel skipped that step, they
        # would keep garbage. So the host decides about the first step.
        return not any(
            group.get("momentum") and "momentum_buffer" not in self._optimizer.state.get(p, {})
            for group in groups
            for p in group["params"]
            if p.grad is not None
        )

    def _decide_on_device(self, flag: torch.Tensor) -> None:
        bad = flag.to(torch.float32)
        before = torch.as_tensor(self._in_a_row, device=bad.device, dtype=torch.float32)
        skipped = bad * (before < self.max_in_a_row)
        # Once the limit is reached, updates go through until one is finite: the count stays while gradients are bad.
        self._in_a_row = bad * (before + skipped)
        self._total = torch.as_tensor(self._total, device=bad.device, dtype=torch.float32) + skipped
        self._skipped = skipped
        self._optimizer.found_inf = skipped  # type: ignore[attr-defined]
        self._put_found_inf = True
