"""Leaving out an optimizer update whose gradients are not finite.

While armed, the guard decides before `optimizer.step`. Parameters, moments and the optimizer's step counter stay
as they are. Fused optimizers on an accelerator take the decision on the device (`found_inf`, the mechanism of
`torch.amp.GradScaler`): no synchronisation. Others cost one scalar read a step while the guard is armed, which
on a CPU is free. At most `max_in_a_row` updates are left out in a row; then the guard lets go and says so,
because a run that skips for ever makes no progress and hides the fault.

In a run of several ranks all leave an update out or none does: each asks the others (`ask_peers`) before the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8watch.actions.clip_control import ClipControl, gradients_of, total_norm, whole
from fp8watch.capture.gradients import has_scaler

MAX_IN_A_ROW = 3


class SkipGuard:
    """Decides, update by update, whether the optimizer may step.

    In the optimizer wrapper: `if guard.before_step(): <do not step>`, then `guard.after_step()` in a `finally`,
    in both cases. Clip before asking.
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
        """`on_device` None: on the device for fused optimizers of accelerators, on the host otherwise."""
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
        self._has_let_go = False
        self._put_found_inf = False
        self._was_asked = False
        self._failure: str | None = None
        self.ask_peers: Callable[[bool, bool], bool] | None = None
        """In a run of several ranks: (this rank's gradients are bad, it may act) -> every rank leaves the update out.
        Called by all ranks at each update while the guard is armed."""

    def unavailable(self) -> str | None:
        """Why it cannot guard; None: it can."""
        if has_scaler(self._scaler):
            return "the GradScaler already skips updates whose gradients are not finite"
        return f"the guard failed when it was last asked: {self._failure}" if self._failure is not None else None

    @property
    def failure(self) -> str | None:
        """Why it could not decide when it was last asked; None: it could. After several in a row nobody asks again."""
        return self._failure

    def arm(self, reason: str) -> None:
        """Guard from the next update on. Several reasons may hold at once."""
        self._reasons.add(reason)
        if self._clip is not None:
            self._clip.keeps_covers = True

    def disarm(self, reason: str) -> None:
        """Drop a reason; without any the guard rests."""
        self._reasons.discard(reason)
        if self._clip is not None:
            self._clip.keeps_covers = bool(self._reasons)

    @property
    def is_armed(self) -> bool:
        """Whether any reason holds."""
        return bool(self._reasons)

    @property
    def is_at_rest(self) -> bool:
        """`before_step` has nothing to do: not armed, and nothing of the last update to forget."""
        return not (self._reasons or self._has_let_go or self._failure is not None or self._skipped is not False)

    @property
    def consulted(self) -> int:
        """Updates that it decided about while armed."""
        return self._consulted

    @property
    def last_skipped(self) -> bool | torch.Tensor:
        """Whether the last update was left out: a bool, or a 0-d device tensor (1.0: left out)."""
        return self._skipped

    @property
    def total(self) -> int | torch.Tensor:
        """Updates left out so far (a 0-d device tensor where the decision is made there)."""
        return self._total

    @property
    def has_let_go(self) -> bool:
        """Host path: whether the last update went through, not finite, because too many in a row were left out."""
        return self._has_let_go

    def before_step(self, *, may_act: bool = True) -> bool:
        """True: leave this update out. On the device path always False, and the kernel leaves it out.

        `may_act` False: nothing is left out, but the other ranks are still answered.
        """
        self._was_asked = True
        self._skipped = False
        self._has_let_go = False
        self._failure = None
        try:
            is_left_out = bool(self._reasons) and self._decide(may_act=may_act)
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise
        self._consulted += bool(self._reasons)
        return is_left_out

    def _decide(self, *, may_act: bool) -> bool:
        if getattr(self._optimizer, "found_inf", None) is not None:
            return False  # a GradScaler has decided already
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
            self._has_let_go = True
            return False
        self._in_a_row = in_a_row + 1
        self._total = self._total + 1
        self._skipped = True
        return True

    def _ask_peers(self, ask: Callable[[bool, bool], bool], *, may_act: bool) -> bool:
        """Reads the flag on the host also for fused optimizers: the others are asked before the kernel starts."""
        is_bad = False
        try:
            flag = self._not_finite()
            is_bad = flag is not None and bool(flag)
        except Exception as error:  # not let out, or nobody would ask here any more while the others wait for an answer
            self._failure = f"{type(error).__name__}: {error}"
        return ask(is_bad, may_act)

    def after_step(self) -> None:
        """Take back what `before_step` put into the optimizer. Also called for an update it was not asked about."""
        if not self._was_asked:
            self._skipped = False
        self._was_asked = False
        if self._put_found_inf:
            self._put_found_inf = False
            for name in ("found_inf", "grad_scale"):
                if hasattr(self._optimizer, name):
                    delattr(self._optimizer, name)

    def _not_finite(self) -> torch.Tensor | None:
        """0-d bool on the gradients' device; None without gradients. Free of synchronisation."""
        covers = self._clip.take_covers() if self._clip is not None else []
        gradients = gradients_of(self._optimizer)
        if not gradients:
            return None
        covers = [cover for cover in covers if cover.touched(gradients)]
        # A norm that is not finite has already spoilt the gradients: 0 or NaN, whatever they were.
        norms = [cover.norm for cover in covers]
        # A 0-norm counts elements and a negative one is of the smallest: neither sees every Inf and NaN.
        telling = [cover for cover in covers if cover.norm_type > 0.0]
        if not all(any(cover.holds(gradient) for cover in telling) for gradient in gradients):
            values = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
            values = [value for value in values if value.numel()]
            if values:
                norms.append(whole(total_norm(values, float("inf"))))
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
        # Fused SGD makes its momentum buffers in the first step, uninitialised: a first step left out by the
        # kernel would leave garbage there. That one is decided on the host.
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
        # Once let go it stays let go until a finite update: the count is kept, not grown, while bad goes on.
        self._in_a_row = bad * (before + skipped)
        self._total = torch.as_tensor(self._total, device=bad.device, dtype=torch.float32) + skipped
        self._skipped = skipped
        self._optimizer.found_inf = skipped  # type: ignore[attr-defined]
        self._put_found_inf = True
