"""attention_logit: the largest attention logit max(q k / sqrt(d)) grows out of bounds.

A softmax over logits in the hundreds is one-hot, its gradient vanishes, and q and k keep growing (Kimi K2 saw more than
1,000 and clips q and k at tau = 100, which is also Megatron's `qk_clip_threshold`). Warn above 50 in 3 of the last 8
observations. Act above 100 in 3 of 8 when the logit has also grown by 1.5x over the run's own median of the last 256
(no action helps a model that lives at a steady 120), or above `HARD` = 1,000, from which no run is known to have
recovered. The value has to be given, `watch.record(attention_logit_max=...)`, as a number or a mapping from modules: no
FP8 library keeps it. Source: detector default D9, precursor P10.
"""

from __future__ import annotations

import math
import statistics

import msgspec

from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.given import given, module_of

SCALAR = "attention_logit_max"
WARN, ACT, HARD = 50.0, 100.0, 1_000.0
GROWTH = 1.5
"""A level this many times the median of the run's past counts as growth."""
WINDOW, STEPS = 8, 3
PAST, MIN_PAST = 256, 32


class Series(msgspec.Struct):
    """One module's newest values, oldest first."""

    recent: list[float] = []
    past: list[float] = []
    since: int = -1


class AttentionLogitState(msgspec.Struct):
    """Scalar name -> its series."""

    series: dict[str, Series] = {}


class AttentionLogit:
    """Largest attention logit, of the run or per module."""

    name = "attention_logit"

    def start(self) -> AttentionLogitState:
        """The state before any sample."""
        return AttentionLogitState()

    def rolled_back(self, state: AttentionLogitState, step: int) -> AttentionLogitState:
        """The newest values are undone; the past is long and stays valid."""
        for series in state.series.values():
            series.recent, series.since = [], -1
        return state

    def update(self, state: AttentionLogitState, sample: Sample) -> tuple[AttentionLogitState, list[Symptom]]:
        """Look at one step; steps without a logit are ignored."""
        values = given(sample, SCALAR)
        found: list[tuple[float, str, bool]] = []
        for name, value in values.items():
            if not math.isfinite(value):
                continue
            series = state.series.setdefault(name, Series())
            usual = statistics.median(series.past) if len(series.past) >= MIN_PAST else math.inf
            series.recent = [*series.recent, value][-WINDOW:]
            if sum(v > WARN for v in series.recent) < STEPS:
                series.since = -1
                series.past = [*series.past, value][-PAST:]
                continue
            series.since = sample.step if series.since < 0 else series.since
            hard = sum(v > HARD for v in series.recent) >= STEPS
            grown = sum(v > max(ACT, GROWTH * usual) for v in series.recent) >= STEPS
            found.append((value, name, hard or grown))
            if not grown:
                series.past = [*series.past, value][-PAST:]
        if not found:
            return state, []
        found.sort(key=lambda item: (not item[2], -item[0]))
        value, name, is_act = found[0]
        return state, [
            Symptom(
                detector=self.name,
                severity="act" if is_act else "warn",
                step=sample.step,
                onset_step=min(state.series[item[1]].since for item in found if item[2] or not is_act),
                modules=tuple(m for item in found if (m := module_of(item[1]))),
                rank=sample.rank_of_extreme.get(name) if sample.num_ranks > 1 else None,
                evidence={
                    "attention_logit": value,
                    "limit": ACT if is_act else WARN,
                    "of": name,
                    "advice": "clip q and k",
                },
            )
        ]
