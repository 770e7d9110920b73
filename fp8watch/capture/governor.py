"""Which steps are sampled, and how sampling is kept within a budget.

Element counts, what-if figures and shadow probes are samples: each kind has an interval, and a step is sampled when
`(step - 1)` is a multiple of it. The cost of the samples (`fp8watch.capture.cost_meter`) is compared with the step
time. Over the budget an interval is doubled, that of probe and what-if before that of element counts; it is reduced
again slowly. What is captured in every step is not a sample and is never thinned.

Ranks need not agree. Intervals differ by powers of two, so a rank that thins samples a subset of the steps of one that
does not, and a merged step holds the counts of the ranks that counted, relative to the elements of the same ranks.
No torch: the rule can be tested without a model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

logger = logging.getLogger(__name__)

Kind = Literal["statistics", "what_if", "shadow"]
THINNED_FIRST: tuple[Kind, ...] = ("shadow", "what_if", "statistics")
"""Order in which kinds are thinned; they recover in reverse order."""
FIRST_SHARE = 0.01
"""Default budget as a share of the step time; FP8 saves 20 to 35 % of it."""
MOST_DOUBLINGS = 10
NEVER = 1_000_000
"""Steps until `next_due` is asked again when every kind is off."""
RECOVER_AFTER = 8
"""Samples of a kind that must be under half of the budget before an interval is halved once."""
SMOOTHING = 0.3
"""Weight of the newest sample in the running mean of its kind's cost."""
STEP_SMOOTHING = 0.05
WARM_SAMPLES = 1
"""First samples of a kind that are ignored: they compile and load kernels."""


@dataclass(slots=True)
class _Kind:
    base: int
    """Interval in steps without thinning; 0: off."""
    doublings: int = 0
    cost_seconds: float = 0.0
    samples: int = 0
    calm: int = 0
    """Samples in a row under half of the budget, since the last change."""

    @property
    def every(self) -> int:
        return self.base << self.doublings


class Governor:
    """`budget`: share of the step time that sampling may take; None: the cost is measured, but nothing is thinned."""

    def __init__(
        self, intervals: Mapping[Kind, int], *, budget: float | None, say: Callable[[str], None] = logger.info
    ) -> None:
        self._kinds = {kind: _Kind(base) for kind, base in intervals.items()}
        self.budget = budget
        self._say = say
        self._step_seconds: float | None = None
        self.num_changes = 0
        """Number of times that intervals were changed."""

    def due(self, kind: Kind, step: int) -> bool:
        """Whether this step (the first is 1) is sampled for this kind."""
        every = self._kinds[kind].every
        return every > 0 and (step - 1) % every == 0

    def next_due(self, step: int) -> int:
        """The first step, not before this one, that is sampled for any kind; `step + NEVER` if all are off."""
        waits = [(1 - step) % kind.every for kind in self._kinds.values() if kind.base]
        return step + min(waits, default=NEVER)

    def every(self, kind: Kind) -> int:
        """The current interval of the kind in steps; 0: off."""
        return self._kinds[kind].every

    def step_took(self, seconds: float) -> None:
        """Add the duration of a step, sampled or not, to the running mean that costs are compared with."""
        if self._step_seconds is None:
            self._step_seconds = seconds
        else:
            # A pause (evaluation, a checkpoint) is not part of a step: count it as at most twice the mean.
            bounded = min(seconds, 2.0 * self._step_seconds)
            self._step_seconds += STEP_SMOOTHING * (bounded - self._step_seconds)

    def cost(self, kind: Kind, seconds: float) -> None:
        """Add the cost of one sample of the kind: the larger of its CPU time and its GPU time."""
        known = self._kinds[kind]
        known.samples += 1
        if known.samples <= WARM_SAMPLES:
            return
        is_first = known.samples == WARM_SAMPLES + 1
        known.cost_seconds = seconds if is_first else known.cost_seconds + SMOOTHING * (seconds - known.cost_seconds)
        if self.budget is not None:
            self._review(known)

    def share(self, kind: Kind | None = None) -> float | None:
        """Measured share of the step time that samples of a kind (None: of all kinds) take; None if unknown."""
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
                # Leave a cheap kind alone: doubling its interval would gain nothing.
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
            # Halving the interval doubles the share.
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
