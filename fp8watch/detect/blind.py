"""blind: fp8watch sees less than it did, or less than there is.

Silence is the worst failure, so missing data is a finding: ranks that send no frames, steps that never arrived, tensors
that are no longer observed, a loss or gradient norm that has stopped coming. Each must last, because stragglers and a
dropped frame are normal. (The pipeline also reports a failing detector under this name.)
Only live frames are judged; the log of another tool has gaps of its own. Source: the rule that whatever is not observed
is named.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.tensors import Array, carried, high_precision, moved, table_of

STEPS = 16
"""Steps in a row for which ranks, tensors or scalars must be missing."""
MISSED = 8
"""Steps of the last `WINDOW` that must be missing."""
WINDOW = 64
SHARE = 0.1
"""Share of the tensors seen before (at least one tensor) that must be missing."""
SCALARS = ("loss", "grad_norm")


class BlindState(msgspec.Struct):
    """What has been seen, and for how long it has been missing."""

    names: list[str] = []
    seen_before: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    unseen: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """[num_tensors] steps in a row without an amax."""
    columns_gone: int = 0
    """Steps in a row without any amax column, once there has been one."""
    known: dict[str, int] = {}
    """Scalar -> steps in which it came, for scalars that still come."""
    gone: dict[str, int] = {}
    """Scalar that used to come -> steps since."""
    ranks_short: int = 0
    last_step: int = -1
    missed: list[list[int]] = []
    """[step, number of steps missing just before it], for the newest `WINDOW` steps."""


class Blind:
    """Ranks, steps, tensors and scalars that are missing."""

    name = "blind"

    def start(self) -> BlindState:
        """The state before any sample."""
        return BlindState()

    def rolled_back(self, state: BlindState, step: int) -> BlindState:
        """Steps start again after `step`; what has been seen is still expected."""
        state.last_step, state.missed = step, []
        state.ranks_short = 0
        return state

    def update(self, state: BlindState, sample: Sample) -> tuple[BlindState, list[Symptom]]:
        """Look at one live step; steps of logs are ignored."""
        if sample.expected_ranks <= 0:
            return state, []
        evidence: dict[str, Any] = {}
        since = sample.step
        state.ranks_short = state.ranks_short + 1 if sample.num_ranks < sample.expected_ranks else 0
        if state.ranks_short >= STEPS:
            evidence["ranks"] = f"{sample.num_ranks} of {sample.expected_ranks} ranks give frames"
            since = min(since, sample.step - state.ranks_short + 1)
        missed = self._steps(state, sample)
        if missed >= MISSED:
            evidence["missing_steps"] = missed
            since = min(since, state.missed[0][0])
        tensors = self._tensors(state, sample)
        if len(tensors) or state.columns_gone >= STEPS:
            count = len(tensors) if state.columns_gone < STEPS else int(state.seen_before.sum())
            evidence["tensors"] = f"{count} of {int(state.seen_before.sum())} tensors are no longer observed"
            since = min(since, sample.step - STEPS + 1)
        for name in SCALARS:
            if name in sample.scalars:
                state.known[name] = state.known.get(name, 0) + 1
                state.gone.pop(name, None)
            elif state.known.get(name, 0) >= STEPS:
                state.gone[name] = state.gone.get(name, 0) + 1
        lost = [name for name, count in state.gone.items() if count >= STEPS]
        if lost:
            evidence["scalars"] = lost
            since = min(since, sample.step - STEPS + 1)
        if not evidence:
            return state, []
        return state, [
            Symptom(
                detector=self.name,
                severity="warn",
                step=sample.step,
                onset_step=max(0, since),
                tensors=tuple(int(i) for i in tensors[:16]),
                evidence=evidence,
            )
        ]

    def _steps(self, state: BlindState, sample: Sample) -> int:
        gap = sample.step - state.last_step - 1 if state.last_step >= 0 else 0
        if gap > 0:
            state.missed.append([sample.step, gap])
        state.missed = [item for item in state.missed if sample.step - item[0] < WINDOW]
        state.last_step = sample.step
        return sum(item[1] for item in state.missed)

    def _tensors(self, state: BlindState, sample: Sample) -> Array:
        """Indices of tensors unobserved for long enough; empty unless they are enough tensors."""
        none = np.zeros(0, dtype=np.int64)
        if "amax" not in sample.values or not sample.tensors:
            state.columns_gone = state.columns_gone + 1 if state.seen_before.any() else 0
            return none
        state.columns_gone = 0
        table = table_of(sample)
        order = moved(table.names, state.names)
        if order is not None:
            state.seen_before = carried(state.seen_before, order, False)
            state.unseen = carried(state.unseen, order, 0)
        state.names = table.names
        valid = sample.valid.get("amax")
        if valid is None or valid.all():
            state.seen_before[:], state.unseen[:] = True, 0
            return none
        here = valid.astype(np.bool_)
        # In BF16 there may be nothing to read: that is known, and not blindness.
        excused = high_precision(sample)
        state.unseen = np.where(here | excused, 0, state.unseen + 1)
        state.seen_before |= here
        gone = np.flatnonzero(state.seen_before & (state.unseen >= STEPS))
        return gone if len(gone) >= max(1, SHARE * int(state.seen_before.sum())) else none
