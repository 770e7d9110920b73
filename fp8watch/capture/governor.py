"""Which steps are looked at more closely, and how that is kept under a budget.

Element counts, what-if figures and shadow probes are samples: each kind has an interval, and a step is sampled when
`(step - 1)` is a multiple of it. What the samples cost is measured (`fp8watch.capture.cost_meter`) against the time
of a step; over the budget an interval is doubled, probe and what-if before element counts, and it comes back slowly.
What is captured in every step is no sample and never thinned.

Ranks need not agree: intervals differ by powers of two, so that the steps of a rank that thins are among those of a
rank that does not, and a merged step holds the counts of the ranks that counted, set against the elements of the same
ranks. No torch: the rule can be tested without a model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

logger = logging.getLogger(__name__)

Kind = Literal["statistics", "what_if", "shadow"]
THINNED_FIRST: tuple[Kind, ...] = ("shadow", "what_if", "statistics")
"""Who gives way first; the way back is the other way round."""
FIRST_SHARE = 0.01
"""Default budget, share of the step time: what sampling may cost where FP8 saves 20 to 35 %."""
MOST_DOUBLINGS = 10
NEVER = 1_000_000
"""Steps; asked again by then."""
RECOVER_AFTER = 8
"""Samples of the kind that must have been under half of the budget before its interval is halved once."""
SMOOTHING = 0.3
"""Weight of the newest sample in the running mean of its kind's cost."""
STEP_SMOOTHING = 0.05
WARM_SAMPLES = 1
"""First samples of a kind that do not count: they compile and load kernels."""


@dataclass(slots=True)
class _Kind:
    base: int
    """Interval in steps when nothing is thinned; 0: off."""
    doublings: int = 0
    cost_seconds: float = 0.0
    samples: int = 0
    calm: int = 0
    """Samples since the last change that were well under the budget."""

    @property
    def every(self) -> int:
        return self.base << self.doublings


class Governor:
    """`budget`: share of the step time that sampling may take; None: measured, never thinned."""

    def __init__(
        self, intervals: Mapping[Kind, int], *, budget: float | None, say: Callable[[str], None] = logger.info
    ) -> None:
        self._kinds = {kind: _Kind(base) for kind, base in intervals.items()}
        self.budget = budget
        self._say = say
        self._step_seconds: float | None = None
        self.num_changes = 0
        """How often intervals were changed."""

    def due(self, kind: Kind, step: int) -> bool:
        """Whether this step (the first is 1) is a sample of the kind."""
        every = self._kinds[kind].every
        return every > 0 and (step - 1) % every == 0

    def next_due(self, step: int) -> int:
        """The first step from this one on that is a sample of any kind; far away where all are off."""
        waits = [(1 - step) % kind.every for kind in self._kinds.values() if kind.base]
        return step + min(waits, default=NEVER)

    def every(self, kind: Kind) -> int:
        """The kind's interval now, in steps; 0: off."""
        return self._kinds[kind].every

    def step_took(self, seconds: float) -> None:
        """Length of a step, sampled or not: the running mean that costs are set against."""
        if self._step_seconds is None:
            self._step_seconds = seconds
        else:
            # A pause (evaluation, a checkpoint) is no step: it moves the mean by no more than a doubling would.
            bounded = min(seconds, 2.0 * self._step_seconds)
            self._step_seconds += STEP_SMOOTHING * (bounded - self._step_seconds)

    def cost(self, kind: Kind, seconds: float) -> None:
        """What one sample of the kind has cost: the larger of CPU time on the training thread and GPU time."""
        known = self._kinds[kind]
        known.samples += 1
        if known.samples <= WARM_SAMPLES:
            return
        is_first = known.samples == WARM_SAMPLES + 1
        known.cost_seconds = seconds if is_first else known.cost_seconds + SMOOTHING * (seconds - known.cost_seconds)
        if self.budget is not None:
            self._review(known)

    def share(self, kind: Kind | None = None) -> float | None:
        """Measured share of the step time that the samples of a kind take, of all kinds for None; None: unknown."""
        if not self._step_seconds:
            return None
        if kind is None:
            return sum(self.share(each) or 0.0 for each in self._kinds)
        known = self._kinds[kind]
        return known.cost_seconds / known.every / self._step_seconds if known.every else 0.0

    def _review(self, sampled: _Kind) -> None:
        share = self.share()
        assert self.budget is not None
        if share is None:
            return
        if share > self.budget:
            self._thin(share)
        elif share <= self.budget / 2:
            sampled.calm += 1
            if sampled.calm >= RECOVER_AFTER:
                self._recover(share)
        else:
            sampled.calm = 0

    def _thin(self, share: float) -> None:
        before = {kind: known.doublings for kind, known in self._kinds.items()}
        for kind in THINNED_FIRST:
            known = self._kinds.get(kind)
            while known is not None and known.every and known.doublings < MOST_DOUBLINGS:
                now = self.share()
                assert self.budget is not None
                # A kind that does not matter is left alone: doubling its interval would gain nothing.
                if now is None or now <= self.budget or (self.share(kind) or 0.0) < self.budget / 8:
                    break
                known.doublings += 1
        for known in self._kinds.values():
            known.calm = 0
        if before != {kind: known.doublings for kind, known in self._kinds.items()}:
            self._tell("thinned", share)

    def _recover(self, share: float) -> None:
        for kind in reversed(THINNED_FIRST):
            known = self._kinds.get(kind)
            if known is None or not known.doublings:
                continue
            # Half the interval is twice its cost.
            assert self.budget is not None
            if share + (self.share(kind) or 0.0) <= self.budget / 2:
                known.doublings -= 1
                for each in self._kinds.values():
                    each.calm = 0
                self._tell("denser again", share)
                return

    def _tell(self, what: str, share: float) -> None:
        self.num_changes += 1
        intervals = ", ".join(f"{kind} every {known.every}" for kind, known in self._kinds.items() if known.every)
        limit = f" (budget {self.budget:.2%})" if self.budget is not None else ""
        self._say(f"sampling {what}: it took {share:.2%} of the step time{limit}; now in steps: {intervals}")
