#!/usr/bin/env python3
"""Would the thresholds of the log rules have been chosen as well without the source on which they are scored?

    python bench/leave_one_source_out.py [--jobs 2]

For each source in tests/data/corpus, six thresholds of loss_spike, grad_spike and divergence are chosen from a grid on
all other sources, by a fixed rule, and scored on the source that was left out. Allowed are settings with at most
`MOST_FALSE` false alarms per 10,000 points, no healthy run alarmed and at most one in ten self-healing outliers acted
on. Of these, the settings that find most events are good. The rule takes the good setting with the widest margin: the
one that is furthest, in steps of the grid, from any setting that is not good, where the edge of the grid counts as not
good. The shipped values play no part in it. What is not in the grid (when a point is hot, the length of windows, the
baseline itself) stays as shipped.
This rule was decided on before it was run, but after two others had been run: the first asked only for the setting with
most good neighbours, the second for the fewest false alarms before that. Their results are given too, as rows of their
own, to show how much depends on such a choice.
Writes its rows to bench/results/detection.json. Takes about three minutes on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any

import detection_result
import numpy as np
from score import Score, findings, score_run, source_of, stride_of, unpack

from fp8watch.detect import divergence, grad_spike, incidents, loss_spike
from fp8watch.detect.base import Sample
from fp8watch.detect.nonfinite import Nonfinite
from fp8watch.detect.pipeline import Pipeline
from fp8watch.detect.spike import SpikeState, judge
from fp8watch.detect.update_rms import UpdateRms
from fp8watch.replay.readers import csv_log

MOST_FALSE = 0.1
OUTLIER_SHARE = 0.1
RECALL_BAR, FALSE_BAR = 0.93, 0.3
Symptoms = list[tuple[int, int, str]]
"""(point, step, severity)"""


class Rule(Enum):
    """How a setting is chosen among those that find most events."""

    MARGIN = "most found, widest margin"
    FEWEST = "most found, fewest false alarms, most good neighbours (tried second)"
    NEIGHBOURS = "most found, most good neighbours (tried first)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One point of the grid."""

    loss_floor: float
    loss_sigma: float
    loss_points: int
    sparse_rise: float
    drift_rise: float
    norm_rise: float


GRID: dict[str, tuple[float, ...]] = {
    "loss_floor": (0.01, 0.015, 0.02, 0.03),
    "loss_sigma": (5.0, 5.5, 6.0, 6.5, 7.0, 8.0, 10.0),
    "loss_points": (2, 3, 4, 5),
    "sparse_rise": (0.1, 0.15, 0.2, 0.25, 0.35, 0.5),
    "drift_rise": (0.02, 0.035, 0.05, 0.07, 0.1),
    "norm_rise": (1.1, 1.6, 2.3),
}
SHIPPED = Setting(
    loss_floor=loss_spike.RULE.floor, loss_sigma=loss_spike.RULE.act_sigma, loss_points=loss_spike.RULE.act_points,
    sparse_rise=loss_spike.RULE.sparse_rise, drift_rise=divergence.ACT_RISE, norm_rise=grad_spike.RULE.act_rise,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Hot:
    """A hot point of the loss, with everything that its severity depends on except the thresholds of the grid."""

    point: int
    step: int
    run: int
    """Step at which the hot run began."""
    peak: float
    """Of the run, in sigma."""
    length: int
    relative: float
    is_sparse: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """The detectors' output on one run, as far as it does not depend on the thresholds of the grid."""

    run: dict[str, Any]
    points: int
    stride: float
    fixed: frozenset[int]
    """Steps at which rules that are not in the grid act."""
    hot: dict[float, list[Hot]]
    """By noise floor."""
    drift: list[tuple[int, int, float, float, int]]
    """(point, step, rise, sigmas, first step of the window) of every drift."""
    norm: dict[float, frozenset[int]]
    """Rise -> steps at which grad_spike acts."""


def trace(run: dict[str, Any]) -> Traces:
    """Run the detectors on one run, once per grid value where their state depends on it."""
    samples = list(csv_log.read(run["path"]).samples)
    others = Pipeline("run", [Nonfinite(), UpdateRms()])
    fixed = [f.step for sample in samples for f in others.observe(sample) if f.severity == "act"]
    steps = [sample.step for sample in samples]
    return Traces(
        run=run, points=len(steps), stride=stride_of(steps), fixed=frozenset(fixed),
        hot={floor: list(_hot(samples, floor)) for floor in GRID["loss_floor"]}, drift=list(_drifts(samples)),
        norm={rise: _norm(samples, rise) for rise in GRID["norm_rise"]},
    )  # fmt: skip


def _hot(samples: Sequence[Sample], floor: float) -> Iterator[Hot]:
    state, rule = SpikeState(), replace(loss_spike.RULE, floor=floor)
    attempt = 0
    for point, sample in enumerate(samples):
        loss = sample.scalars.get("loss")
        if sample.attempt > attempt:
            attempt, state = sample.attempt, loss_spike.LossSpike().rolled_back(state, sample.step - 1)
        if loss is None or not math.isfinite(loss):
            continue
        judged = judge(state, rule, sample.step, loss)
        if not state.run_steps or state.run_steps[-1] != sample.step:
            continue
        centre = state.baseline.centre
        yield Hot(
            point=point, step=sample.step, run=state.run_steps[0],
            peak=(max(state.run_values) - centre) * judged.z / judged.rise, length=len(state.run_values),
            relative=judged.rise / max(abs(centre), 1e-12), is_sparse=state.stride >= rule.sparse_stride,
        )  # fmt: skip


def _drifts(samples: Sequence[Sample]) -> Iterator[tuple[int, int, float, float, int]]:
    shipped, divergence.ACT_RISE = divergence.ACT_RISE, min(GRID["drift_rise"])
    try:
        rule = divergence.Divergence()
        state, attempt = rule.start(), 0
        for point, sample in enumerate(samples):
            if sample.attempt > attempt:
                attempt, state = sample.attempt, rule.rolled_back(state, sample.step - 1)
            state, symptoms = rule.update(state, sample)
            for symptom in symptoms:
                seen = symptom.evidence
                yield point, sample.step, math.log1p(seen["rise_ratio"]), seen["sigmas"], seen["window_steps"][0]
    finally:
        divergence.ACT_RISE = shipped


def _norm(samples: Sequence[Sample], rise: float) -> frozenset[int]:
    shipped, grad_spike.RULE = grad_spike.RULE, replace(grad_spike.RULE, act_rise=rise)
    try:
        pipeline = Pipeline("run", [grad_spike.GradSpike()])
        return frozenset(f.step for sample in samples for f in pipeline.observe(sample) if f.severity == "act")
    finally:
        grad_spike.RULE = shipped


def loss_symptoms(hot: Sequence[Hot], setting: Setting) -> Symptoms:
    """What loss_spike reports under a setting, by its own rule."""
    seen: Symptoms = []
    acting = None
    for point in hot:
        is_high = point.peak > setting.loss_sigma
        is_alone = point.is_sparse and point.relative > setting.sparse_rise
        if acting == point.run or (is_high and (point.length >= setting.loss_points or is_alone)):
            acting = point.run
            seen.append((point.point, point.step, "act"))
        elif point.peak > loss_spike.RULE.warn_sigma:
            seen.append((point.point, point.step, "warn"))
    return seen


def acted(symptoms: Symptoms, close_after: int) -> set[int]:
    """Steps at which an incident of these symptoms becomes a case to act."""
    steps: set[int] = set()
    last, is_act = -math.inf, False
    for point, step, severity in symptoms:
        if point - last > close_after:
            is_act = False
        last = point
        if severity == "act" and not is_act:
            is_act = True
            steps.add(step)
    return steps


def fired(traces: Traces, setting: Setting) -> frozenset[int]:
    """Steps at which the run is acted on under a setting."""
    losses = loss_symptoms(traces.hot[setting.loss_floor], setting)
    spikes = [step for _, step, severity in losses if severity == "act"]
    drifts: Symptoms = []
    for point, step, rise, sigmas, first in traces.drift:
        if rise < setting.drift_rise / 2 or any(first <= spike <= step for spike in spikes):
            continue
        is_act = rise >= setting.drift_rise and sigmas >= divergence.ACT_SIGMA
        drifts.append((point, step, "act" if is_act else "warn"))
    found = acted(losses, incidents.CLOSE_SPIKE_AFTER) | acted(drifts, incidents.CLOSE_AFTER)
    return traces.fixed | traces.norm[setting.norm_rise] | found


def score_settings(traces: Traces, settings: Sequence[Setting]) -> list[Score]:
    """One run under every setting."""

    @cache
    def scored(steps: frozenset[int]) -> Score:
        return score_run(traces.run, steps, points=traces.points, stride=traces.stride)

    return [scored(fired(traces, setting)) for setting in settings]


def is_allowed(score: Score) -> bool:
    """Whether a setting keeps the bars on the sources on which it is chosen."""
    few = score.outliers_acted <= OUTLIER_SHARE * score.outliers
    return score.false_per_10k <= MOST_FALSE and score.healthy_alarmed == 0 and few


def choose(settings: Sequence[Setting], scores: Sequence[Score], rule: Rule) -> int:
    """Index of the setting that the rule chooses."""
    allowed = [index for index, score in enumerate(scores) if is_allowed(score)]
    if not allowed:
        return min(range(len(scores)), key=lambda index: (scores[index].false_alarms, -scores[index].found))
    most = max(scores[index].found for index in allowed)
    good = {index for index in allowed if scores[index].found == most}
    if rule is Rule.FEWEST:
        alarms = {index: (scores[index].false_alarms, scores[index].outliers_acted) for index in good}
        good = {index for index in good if alarms[index] == min(alarms.values())}
    places = {setting: index for index, setting in enumerate(settings)}

    def neighbours(index: int) -> int:
        return sum(places[near] in good for near in _neighbours(settings[index]))

    if rule is not Rule.MARGIN:
        return max(sorted(good), key=neighbours)
    margin = margins(good, [len(values) for values in GRID.values()])
    widest = max(margin.values())
    return max(sorted(index for index in good if margin[index] == widest), key=lambda index: _room(index, good))


def margins(good: set[int], shape: Sequence[int]) -> dict[int, int]:
    """Good setting -> steps of the grid to the nearest setting that is not good, or to the edge of the grid.

    Settings are numbered in the order of the grid's product, the last axis fastest.
    """
    inside = np.zeros(shape, dtype=np.bool_)
    inside.flat[sorted(good)] = True
    depth = np.zeros(shape, dtype=np.int64)
    while inside.any():
        depth += inside
        padded = np.pad(inside, 1)
        for axis in range(len(shape)):
            for ahead in (-1, 1):
                inside = inside & np.roll(padded, ahead, axis)[(slice(1, -1),) * len(shape)]
    return {index: int(depth.flat[index]) for index in good}


def _room(index: int, good: set[int]) -> int:
    """How many steps a setting can be moved along each axis, both ways, and remain good; summed over the axes."""
    shape = [len(values) for values in GRID.values()]
    place = np.unravel_index(index, shape)
    room = 0
    for axis, length in enumerate(shape):
        stride = math.prod(shape[axis + 1 :])
        for ahead in (-1, 1):
            at, spot = index, int(place[axis])
            while 0 <= spot + ahead < length and at + ahead * stride in good:
                at, spot, room = at + ahead * stride, spot + ahead, room + 1
    return room


def _neighbours(setting: Setting) -> Iterator[Setting]:
    for name, values in GRID.items():
        place = values.index(getattr(setting, name))
        for other in (place - 1, place + 1):
            if 0 <= other < len(values):
                yield replace(setting, **{name: values[other]})  # type: ignore[arg-type]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    chosen = parser.parse_args()
    settings = [Setting(**dict(zip(GRID, values, strict=True))) for values in itertools.product(*GRID.values())]  # type: ignore[arg-type]
    with (
        tempfile.TemporaryDirectory(prefix="fp8watch-corpus-") as folder,
        ProcessPoolExecutor(chosen.jobs) as pool,
    ):
        traced = list(pool.map(trace, unpack(Path(folder))))
        live = list(pool.map(_live, traced))
        table = list(pool.map(partial(score_settings, settings=settings), traced))
    apart = [traces.run["file"] for traces, steps in zip(traced, live, strict=True) if steps != fired(traces, SHIPPED)]
    if apart:
        raise SystemExit(f"the settings' own rule is not that of the detectors on {apart}")
    rows = [row for rule in Rule for row in _rows(traced, table, settings, rule)]
    for row in rows:
        print(row)
    detection_result.merge("leave_one_source_out", "bench/leave_one_source_out.py", rows)
    return 0 if rows[0]["pass"] else 1


def _rows(
    traced: Sequence[Traces], table: Sequence[Sequence[Score]], settings: Sequence[Setting], rule: Rule
) -> Iterator[dict[str, Any]]:
    """The result of one rule, and of the first rule each source's."""
    sources = sorted({source_of(traces.run) for traces in traced})
    everywhere, rows, pooled = range(len(traced)), [], Score()
    for source in sources:
        ours = [index for index in everywhere if source_of(traced[index].run) == source]
        rest = [index for index in everywhere if index not in ours]
        index = choose(settings, [_sum(table, rest, i) for i in range(len(settings))], rule)
        here, there = _sum(table, ours, index), _sum(table, rest, index)
        pooled += here
        rows.append(_row(source, settings[index], here, there))
    every = choose(settings, [_sum(table, everywhere, i) for i in range(len(settings))], rule)
    yield {
        "name": f"leave-one-source-out: {rule.value}", "sources": len(sources), "settings": len(settings),
        **pooled.as_json(), "bar": {"recall": RECALL_BAR, "false_per_10k_points": FALSE_BAR},
        "pass": pooled.recall >= RECALL_BAR and pooled.false_per_10k <= FALSE_BAR,
        "chosen_on_all": _as_json(settings[every]), "shipped": _as_json(SHIPPED),
    }  # fmt: skip
    if rule is Rule.MARGIN:
        yield from rows


def _live(traces: Traces) -> frozenset[int]:
    return frozenset(findings(traces.run["path"]))


def _sum(table: Sequence[Sequence[Score]], runs: Sequence[int] | range, setting: int) -> Score:
    return sum((table[run][setting] for run in runs), Score())


def _as_json(setting: Setting) -> dict[str, float]:
    return {name: getattr(setting, name) for name in GRID}


def _row(source: str, setting: Setting, here: Score, there: Score) -> dict[str, Any]:
    return {
        "name": f"without {source}", "setting": _as_json(setting), "left_out": here.as_json(),
        "chosen_at": {"recall": round(there.recall, 3) if there.events else None, "false_alarms": there.false_alarms},
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
