"""From the state of runs to metric families: which series there are, and which go when there are too many.

Series of a tensor lie at block level, `layer` empty: gauges are the extreme over the block's layers (largest
amax and scale, smallest head-room), counters the sum, so that summing a counter counts every element once.
The worst K layers have gauges of their own besides, never counters.

Under the budget the order of importance is: state and scalars, counters that have counted, block level,
worst layers, and last the zeros that are shown so that a first increase is seen by `rate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fp8watch import __version__
from fp8watch.metrics import BY_NAME, CATALOGUE, HEADROOM_BUCKETS, PREFIX, Metric
from fp8watch.records import ACTIONS, DETECTORS
from fp8watch.wire import WIRE_VERSION
from fp8watch_agent.run_metrics import ENDINGS, GAUGES, NONFINITE_QUANTITIES, STATES, RunMetrics
from fp8watch_agent.tensor_metrics import CLASSES

Floats = npt.NDArray[np.float32]
Labels = tuple[str, ...]

CAUSES = ("precision", "optimisation", "data", "hardware", "bookkeeping", "unknown")
_SCALARS, _COUNTED, _BLOCKS, _LAYERS, _ZEROS = range(5)
_ELEMENTS = {
    "quantized": "fp8watch_quantized_elements_total",
    "saturated": "fp8watch_saturated_elements_total",
    "underflowed": "fp8watch_underflowed_elements_total",
    "blocks": "fp8watch_scaled_blocks_total",
    "clipped_blocks": "fp8watch_clipped_blocks_total",
}


@dataclass(slots=True)
class Family:
    """One metric with its samples; of a histogram, `buckets` (cumulative counts, +Inf last) instead."""

    metric: Metric
    samples: list[tuple[Labels, float]] = field(default_factory=list)
    buckets: list[tuple[Labels, list[int]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Sample:
    importance: int
    run: RunMetrics
    name: str
    labels: Labels
    value: float


def build(runs: list[RunMetrics], now: float, budget: int) -> list[Family]:
    """All families, in the order of the catalogue. Series beyond `budget` are left out and counted per run."""
    families = {metric.name: Family(metric=metric) for metric in CATALOGUE}
    families[PREFIX + "build_info"].samples.append(((__version__, str(WIRE_VERSION)), 1.0))
    left = budget - 1
    histograms = [(run, row) for run in runs for row in range(len(CLASSES)) if run.tensors.histogram[row].any()]
    samples = [sample for run in runs for sample in _run_samples(run, now)]
    samples.sort(key=lambda sample: sample.importance)
    left -= len(runs) + len(histograms) * (len(HEADROOM_BUCKETS) + 3)
    taken, over = samples[: max(0, left)], samples[max(0, left) :]
    for sample in taken:
        families[sample.name].samples.append((sample.labels, sample.value))
    for run, row in histograms:
        counts = [int(count) for count in np.cumsum(run.tensors.histogram[row])]
        families[PREFIX + "headroom_log2"].buckets.append(((run.run, CLASSES[row]), counts))
    for run in runs:
        num_over = sum(sample.run is run for sample in over)
        run.series_dropped += max(0, num_over - run.series_over)
        run.series_over = num_over
        families[PREFIX + "agent_series_dropped_total"].samples.append(((run.run,), float(run.series_dropped)))
    return list(families.values())


def _run_samples(run: RunMetrics, now: float) -> Iterator[_Sample]:
    def make(importance: int, name: str, value: float, *labels: str) -> _Sample:
        full = name if name in BY_NAME else PREFIX + name
        return _Sample(importance, run, full, (run.run, *labels), float(value))

    for reason, count in run.dropped.items():
        yield make(_SCALARS if count else _ZEROS, "frames_dropped_total", count, reason)
    if not run.run:
        return
    for reason, count in run.unseen.items():
        yield make(_SCALARS if count else _ZEROS, "frames_unseen_total", count, reason)
    hello = run.hello
    if hello is not None:
        yield make(_SCALARS, "run_info", 1, hello.policy_name, run.mode, _framework(run), run.recipe, hello.host)
    for rank, said in sorted(run.hellos.items()):
        gpu, uuid = said.framework.get("gpu", ""), said.framework.get("gpu_uuid", "")
        yield make(_SCALARS, "rank_info", 1, str(rank), gpu, uuid)
    for state in STATES:
        yield make(_SCALARS, "run_state", state == run.state, state)
    yield make(_SCALARS, "run_failed", run.has_failed)
    if run.expected_ranks:
        yield make(_SCALARS, "expected_ranks", run.expected_ranks)
    if run.open is not None:
        for severity in ("warn", "act"):
            yield make(_SCALARS, "open_findings", 0, "", "", severity)
        for finding in sorted(run.open):
            yield make(_SCALARS, "open_findings", 1, *finding)
    position = run.position()
    if position is not None:
        for name, value in zip(("attempt", "step", "last_step_timestamp_seconds"), position, strict=True):
            yield make(_SCALARS, name, value)
    for scalar, name in {
        **GAUGES,
        "observed_modules": "observed_modules",
        "expected_modules": "expected_modules",
    }.items():
        merged = run.gauge(scalar)
        if merged is not None:
            yield make(_SCALARS, name, merged)
    largest = run.largest("loss")
    if largest is not None:
        yield make(_SCALARS, "loss_max", largest[0])
        yield make(_SCALARS, "loss_max_rank", largest[1])
    overhead = run.overhead_ratio()
    if overhead is not None:
        yield make(_SCALARS, "overhead_ratio", overhead)
    for kind in ("statistics", "what_if", "shadow"):
        interval = run.gauge(f"{kind}_every")
        if interval is not None:
            yield make(_SCALARS, "sampling_interval_steps", interval, kind)
    for moment in ("exp_avg", "exp_avg_sq"):
        for figure in ("amax", "underflow_ratio"):
            held = run.gauge(f"{moment}_{figure}")
            if held is not None:
                yield make(_SCALARS, f"optimizer_state_{figure}", held, moment)
    for task, score in run.evaluations.items():
        if np.isfinite(score):
            yield make(_SCALARS, "evaluation_score", score, task)
    for name, value in (
        ("steps_total", run.steps), ("tokens_total", run.tokens), ("clipped_steps_total", run.clipped_steps),
        ("skipped_steps_total", run.skipped_steps), ("loss_spikes_total", run.loss_spikes),
        ("store_errors_total", run.store_errors),
    ):  # fmt: skip
        yield make(_SCALARS, name, value)
    for quantity in NONFINITE_QUANTITIES:
        yield make(_SCALARS, "nonfinite_total", run.nonfinite[quantity], quantity)
    for detector in DETECTORS:
        for cause in CAUSES:
            for severity in ("warn", "act"):
                count = run.findings[detector, cause, severity]
                yield make(_COUNTED if count else _ZEROS, "findings_total", count, detector, cause, severity)
    endings = dict.fromkeys(
        [*((action, e) for action in ACTIONS for e in ("pending", *ENDINGS, "failed")), *run.actions]
    )
    for action, ending in endings:
        count = run.actions[action, ending]
        yield make(_COUNTED if count else _ZEROS, "actions_total", count, action, ending)
    for importance, name, value, labels in _tensor_samples(run, now):
        yield make(importance, name, value, *labels)


def _tensor_samples(run: RunMetrics, now: float) -> Iterator[tuple[int, str, float, Labels]]:
    tensors = run.tensors
    if not tensors.modules:
        return
    keys = list(zip(tensors.blocks, tensors.tensors, strict=True))
    groups = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    group_of = np.array([groups[key] for key in keys], dtype=np.intp)
    headroom, headroom_min = tensors.gauge("headroom"), tensors.headroom_min_60s(now)
    gauges: dict[str, tuple[Floats, np.ufunc]] = {
        "tensor_amax": (tensors.gauge("amax"), np.fmax),
        "tensor_amax_max_60s": (tensors.amax_max_60s(now), np.fmax),
        "tensor_scale": (tensors.gauge("scale"), np.fmax),
        "tensor_shadow_error": (tensors.gauge("shadow_error"), np.fmax),
        "tensor_scale_spread_log2": (tensors.gauge("scale_spread"), np.fmax),
        "tensor_headroom_log2": (headroom, np.fmin),
        "tensor_headroom_log2_min_60s": (headroom_min, np.fmin),
    }
    counters = {_ELEMENTS[name]: values for name, values in tensors.counts.items()}
    counters["fp8watch_tensor_clipped_steps_total"] = tensors.clipped_steps
    for name, values in counters.items():
        sums = np.zeros(len(groups), dtype=np.uint64)
        np.add.at(sums, group_of, values)
        for (block, tensor), index in groups.items():
            yield _BLOCKS, name, float(sums[index]), (block, "", tensor)
    for name, (rows, pick) in gauges.items():
        extremes = np.full(len(groups), np.nan, dtype=np.float32)
        pick.at(extremes, group_of, rows)
        for (block, tensor), index in groups.items():
            if not np.isnan(extremes[index]):
                yield _BLOCKS, name, float(extremes[index]), (block, "", tensor)
    chosen = set(run.worst.select(now, tensors.modules, headroom, headroom_min))
    for row, module in enumerate(tensors.modules):
        if module in chosen:
            labels = (tensors.blocks[row], module, tensors.tensors[row])
            for name, (rows, _) in gauges.items():
                if not np.isnan(rows[row]):
                    yield _LAYERS, name, float(rows[row]), labels


def _framework(run: RunMetrics) -> str:
    versions = {} if run.hello is None else run.hello.framework
    for name in ("transformer_engine", "torch"):
        if versions.get(name):
            return f"{name} {versions[name]}"
    return ""
