"""clip_rate: more and more steps hit the clip limit.

Clipping is meant for transients. Adam does not feel a limit that every step hits, and a clip rate that has risen for
good says that the gradient norm has. The share of clipped steps (gradient norm before clipping above the limit) over
`WINDOW` steps is compared with the lowest share of any earlier window under the same limit. Warn above 5 % and 3x that
lowest share; above 20 % the evidence says "severe". Runs that clip every step from the start (low limits, large models)
are not reported: they are trained that way. A changed limit starts a new past. Never an act symptom: the remedy belongs
to whatever moves the norm.
Source: detector default D14 (5 % and 20 % of 300 steps); healthy runs of 130 M to 1.2 B parameters clip at most 0.5 %.
"""

from __future__ import annotations

import math

import msgspec

from fp8watch.detect.base import Sample, Symptom

WINDOW = 300
WARN, SEVERE = 0.05, 0.20
TIMES = 3.0
"""Factor over the lowest share of an earlier window."""
REST = 0.01
"""Smallest share assumed to be ordinary for a run."""


class ClipRateState(msgspec.Struct):
    """The clip flags of the window, and the lowest share so far."""

    flags: list[bool] = []
    """Whether each of the newest steps was clipped, oldest first."""
    clipped: int = 0
    """How many flags are set."""
    lowest: float = 2.0
    """Lowest share of a full window so far; 2: none yet."""
    points: int = 0
    limit: float = -1.0
    since: int = -1


class ClipRate:
    """Share of clipped steps, compared with the run's own past."""

    name = "clip_rate"

    def start(self) -> ClipRateState:
        """The state before any sample."""
        return ClipRateState()

    def rolled_back(self, state: ClipRateState, step: int) -> ClipRateState:
        """The window starts again; the lowest share stays."""
        return ClipRateState(lowest=state.lowest, limit=state.limit)

    def update(self, state: ClipRateState, sample: Sample) -> tuple[ClipRateState, list[Symptom]]:
        """Look at one step; steps without a norm and a limit are ignored."""
        limit, norm = sample.scalars.get("clip_limit"), sample.scalars.get("grad_norm")
        if limit is None or norm is None or not 0 < limit < math.inf or not math.isfinite(norm):
            return state, []
        if limit != state.limit:
            state = ClipRateState(limit=limit)
        is_clipped = norm > limit
        state.flags.append(is_clipped)
        state.clipped += is_clipped
        state.points += 1
        if len(state.flags) > WINDOW:
            state.clipped -= state.flags.pop(0)
        if len(state.flags) < WINDOW:
            return state, []
        share = state.clipped / WINDOW
        ordinary = state.lowest
        is_high = ordinary <= 1.0 and share > max(WARN, TIMES * max(ordinary, REST))
        if state.points % WINDOW == 0 and not is_high:
            state.lowest = min(state.lowest, share)
        if not is_high:
            state.since = -1
            return state, []
        state.since = sample.step if state.since < 0 else state.since
        evidence = {
            "clipped_ratio": round(share, 4),
            "ordinary_ratio": round(ordinary, 4),
            "clip_limit": limit,
            "window": WINDOW,
            "is_severe": share > SEVERE,
        }
        return state, [
            Symptom(detector=self.name, severity="warn", step=sample.step, onset_step=state.since, evidence=evidence)
        ]
