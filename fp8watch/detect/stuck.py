"""stuck: something that must change is bit-identical.

No two steps of a training give the same loss in all bits, nor the same amax in every activation: that would take the
same batch and the same parameters. It is a warning when, for `POINTS` steps in a row,
- loss and gradient norm are bit-identical: parameters and data do not change, or what is recorded is not the loss;
- the amax of every activation and gradient is: the same batch again, or a capture that reads an old buffer;
- the update is exactly 0 although the learning rate is not and nothing was skipped: the optimizer holds other
  parameters than the model, or its step does nothing;
or when a tensor whose amax was not 0 has an amax of exactly 0 for `DEAD_POINTS` steps in a row: it is dead (an empty
tensor, such as that of an expert without tokens, is not observed and does not count). An amax of 0 is never an
overflow, and after a NaN it means nothing (kernels leave NaN out of it). Only live frames are judged: a log may be
rounded or repaired.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.tensors import Array, carried, moved, observed, table_of

POINTS = {"loss": 256, "activations": 32, "parameters": 32}
"""Steps in a row. A loss may be recorded coarsely (as an integer, or cached), so it takes more of them."""
DEAD_POINTS = 32
FINGERPRINT_TENSORS = 4
"""Smallest number of activations and gradients with a positive amax that can count as all unchanged."""


class StuckState(msgspec.Struct):
    """Newest values, and for how many steps they have not changed."""

    names: list[str] = []
    loss: tuple[float, float] = (math.nan, math.nan)
    """Loss and gradient norm."""
    amax: Array = msgspec.field(default_factory=lambda: np.zeros(0))
    """[num_tensors] last observed amax."""
    was_alive: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    dead: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """[num_tensors] steps in a row with an amax of 0."""
    still: dict[str, int] = {}
    """Quantity -> steps for which it has not changed."""


class Stuck:
    """Bit-identical repetition, and tensors that have died."""

    name = "stuck"

    def start(self) -> StuckState:
        """The state before any sample."""
        return StuckState()

    def rolled_back(self, state: StuckState, step: int) -> StuckState:
        """Steps repeat now, and rightly give the same values."""
        return StuckState()

    def update(self, state: StuckState, sample: Sample) -> tuple[StuckState, list[Symptom]]:
        """Look at one step."""
        if sample.expected_ranks <= 0:
            return state, []
        scalars = sample.scalars
        loss = (scalars.get("loss", math.nan), scalars.get("grad_norm", math.nan))
        is_same = loss[0] == state.loss[0] and loss[1] == state.loss[1]
        self._count(state, "loss", is_same)  # NaN, as for a value that is not observed, equals nothing
        state.loss = loss
        moved_by, rate = scalars.get("update_rms"), scalars.get("learning_rate")
        if moved_by is not None:
            is_update = scalars.get("update_skipped", 0.0) == 0 and (rate is None or rate > 0)
            self._count(state, "parameters", moved_by == 0 and is_update)
        is_finite = all(math.isfinite(scalars.get(name, 0.0)) for name in ("loss", "grad_norm"))
        dead = self._tensors(state, sample) if sample.tensors and is_finite else None
        still = sorted(name for name, count in state.still.items() if count >= POINTS[name])
        has_dead = dead is not None and len(dead) > 0
        if not still and not has_dead:
            return state, []
        count = max([state.still[name] for name in still], default=0)
        evidence: dict[str, Any] = {"stands_still": still, "for_points": count}
        if has_dead and dead is not None:
            evidence |= {"dead_tensors": len(dead), "for_points": int(max(count, state.dead[dead].max()))}
        return state, [
            Symptom(
                detector=self.name,
                severity="warn",
                step=sample.step,
                onset_step=max(0, sample.step - int(evidence["for_points"])),
                tensors=tuple(int(i) for i in dead) if dead is not None else (),
                evidence=evidence,
            )
        ]

    def _count(self, state: StuckState, what: str, is_still: bool) -> None:
        if is_still:
            state.still[what] = state.still.get(what, 0) + 1
        elif what in state.still:
            del state.still[what]

    def _tensors(self, state: StuckState, sample: Sample) -> Array | None:
        """Indices of dead tensors; None where no amax was observed."""
        column = observed(sample, "amax")
        if column is None:
            return None
        table = table_of(sample)
        order = moved(table.names, state.names)
        if order is not None:
            state.amax, state.was_alive = carried(state.amax, order, np.nan), carried(state.was_alive, order, False)
            state.dead = carried(state.dead, order, 0)
        state.names = table.names
        amax, seen = column
        shown = seen & ~table.is_weight & (amax > 0)
        is_same = int(shown.sum()) >= FINGERPRINT_TENSORS and bool((amax[shown] == state.amax[shown]).all())
        self._count(state, "activations", is_same)
        state.amax = np.where(seen, amax, state.amax)
        state.dead = np.where(seen, np.where((amax == 0) & state.was_alive, state.dead + 1, 0), state.dead)
        state.was_alive |= seen & (amax > 0)
        return np.flatnonzero(state.dead >= DEAD_POINTS)
