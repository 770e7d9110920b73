"""amax_jump: a tensor's amax leaps within one step.

J = log2(amax) - median of its last 32 ordinary values. A weight moves by at most one optimizer update per step, so
when its amax grows by more than 3 bits (8x) at once, something other than the optimizer moved it: a flipped bit, a bad
load, a stray write. That is an act symptom in the step itself and for as long as it lasts. Activations and gradients
follow the batch, so for them a jump of 3 bits is only a warning (an outlier).
Source: detector default D3 (1 bit, 3 bits), precursor P2.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.tensors import Array, Rows, observed, table_of

WINDOW = 32
MIN_BASELINE = 8
JUMP_LOG2 = 3.0
"""Bits in one step that an optimizer update of ordinary size cannot make."""
SLACK_LOG2 = 1.0
"""How far a median that is up to 7 steps old may be off, in bits. Tensors this near are judged by the exact median."""
FORGET_AFTER = 64
"""Steps after which a level that persists becomes the new ordinary one."""


class AmaxJumpState(msgspec.Struct):
    """The ordinary log2 amax of each tensor, and since when each tensor has been outside it."""

    ordinary: Rows = msgspec.field(default_factory=Rows)
    since: dict[str, int] = {}
    jumped: list[str] = []
    """Weights that jumped and have not returned."""


class AmaxJump:
    """Leaps of log2 amax, compared with the tensor's own past."""

    name = "amax_jump"
    of_tensors = True

    def start(self) -> AmaxJumpState:
        """The state before any sample."""
        return AmaxJumpState()

    def rolled_back(self, state: AmaxJumpState, step: int) -> AmaxJumpState:
        """Ordinary values stay valid; tensors outside them are forgotten."""
        state.since, state.jumped = {}, []
        return state

    def update(self, state: AmaxJumpState, sample: Sample) -> tuple[AmaxJumpState, list[Symptom]]:
        """Look at one step."""
        column = observed(sample, "amax")
        if column is None:
            return state, []
        table = table_of(sample)
        state.ordinary.follow(table.names, WINDOW)
        usable = column[1] & np.isfinite(column[0]) & (column[0] > 0)
        value = np.log2(np.where(usable, column[0], 1.0))
        has_past = usable & (state.ordinary.held >= MIN_BASELINE)
        screened = value - state.ordinary.screen()
        near = np.flatnonzero(has_past & (screened > JUMP_LOG2 - SLACK_LOG2))
        if not len(near) and not state.since:
            state.ordinary.push(value, usable)
            return state, []
        medians = state.ordinary.median(near)
        jump = np.zeros(len(value))
        jump[near] = value[near] - medians
        out = jump > JUMP_LOG2
        self._follow(state, sample, out, value, table.is_weight)
        inside = usable.copy()
        inside[[i for i in np.flatnonzero(out) if table.names[i] in state.since]] = False
        state.ordinary.push(value, inside)
        weights = [int(i) for i in np.flatnonzero(out) if table.names[i] in state.jumped]
        hit = weights or [int(i) for i in np.flatnonzero(out & ~table.is_weight)]
        if not hit:
            return state, []
        order = sorted(hit, key=lambda i: -float(jump[i]))
        worst = order[0]
        evidence: dict[str, Any] = {
            "jump_log2": round(float(jump[worst]), 3),
            "amax": float(column[0][worst]),
            "ordinary_amax": float(2.0 ** (value[worst] - jump[worst])),
            "kind": sample.tensors[worst].tensor,
            "num_tensors": len(order),
            "num_of_kind": int(np.sum(usable & (table.kinds == table.kinds[worst]))),
            "num_jumped_of_kind": int(np.sum(table.kinds[order] == table.kinds[worst])),
        }
        return state, [
            Symptom(
                detector=self.name,
                severity="act" if weights else "warn",
                step=sample.step,
                onset_step=min(state.since.get(table.names[i], sample.step) for i in order),
                tensors=tuple(order),
                rank=sample.rank_of_extreme.get("amax"),
                evidence=evidence,
            )
        ]

    def _follow(self, state: AmaxJumpState, sample: Sample, out: Array, value: Array, is_weight: Array) -> None:
        """Update since when tensors have been outside, and which weights got there in one step."""
        names, before = state.ordinary.names, state.ordinary.last()
        known, outside = set(state.jumped), set()
        for i in np.flatnonzero(out):
            name = names[i]
            outside.add(name)
            in_one_step = float(value[i] - before[i]) > JUMP_LOG2
            if name not in state.since and is_weight[i] and in_one_step:
                known.add(name)
            state.since.setdefault(name, sample.step)
        state.since = {
            name: step for name, step in state.since.items() if name in outside and sample.step - step < FORGET_AFTER
        }
        state.jumped = sorted(name for name in known if name in state.since)
