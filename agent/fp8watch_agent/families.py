"""Turns the state of a run into samples, grouped by importance. `series_budget` decides which of them are exported.

Tensor series are aggregated per block, with an empty `layer` label. Gauges hold the extreme over the block's layers
(largest amax and scale, smallest head-room). Counters hold the sum, so that every element is counted once. The worst K
layers also have gauges of their own, but no counters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8watch.metrics import HEADROOM_BUCKETS, PREFIX, Metric
from fp8watch.records import ACTIONS, DETECTORS
from fp8watch_agent.run_metrics import ENDINGS, GAUGES, NONFINITE_QUANTITIES, STATES, RunMetrics
from fp8watch_agent.tensor_metrics import CLASSES, TensorView
from fp8watch_agent.worst import WorstLayers

Floats = npt.NDArray[np.float32]
Labels = tuple[str, ...]

CAUSES = ("precision", "optimisation", "data", "hardware", "bookkeeping", "unknown")
SCALARS, COUNTED, BLOCKS, LAYERS, ZEROS = range(5)
"""Importance after the run's state, highest first: scalars; counters above zero; tensors per block; the worst layers;
and counters at zero, which are exported so that `rate` sees their first increase."""
Sample = tuple[str, Labels, float]
"""Name without the prefix, label values, value."""
Grouped = dict[int, list[Sample]]
"""Importance -> samples."""
HISTOGRAM_SERIES = len(HEADROOM_BUCKETS) + 1
"""Series of one histogram: its buckets with +Inf. Without a sum there is no count either."""
_ELEMENTS = {
    "quantized": "quantized_elements_total",
    "saturated": "saturated_elements_total",
    "underflowed": "underflowed_elements_total",
    "blocks": "scaled_blocks_total",
    "clipped_blocks": "clipped_blocks_total",
}


@dataclass(slots=True)
class Family:
    """One metric with its samples. A histogram has `buckets` instead: cumulative counts, +Inf last."""

    metric: Metric
    samples: list[tuple[Labels, float]] = field(default_factory=list)
    buckets: list[tuple[Labels, list[int]]] = field(default_factory=list)


def of_state(run: RunMetrics) -> list[Sample]:
    """The run's state: its most important samples."""
    return [(name, (run.run, *labels), float(value)) for name, value, *labels in _state_samples(run)]


def of_run(run: RunMetrics) -> Grouped:
    """The other samples of `RunMetrics.head`: everything but the tensors."""
    grouped: Grouped = defaultdict(list)
    for importance, name, value, *labels in _run_samples(run):
        grouped[importance].append((name.removeprefix(PREFIX), (run.run, *labels), float(value)))
    return grouped


def of_tensors(run: str, view: TensorView, worst: WorstLayers, now: float) -> Grouped:
    """The samples of a run's tensors, without the histograms."""
    grouped: Grouped = defaultdict(list)
    for importance, name, value, (block, layer, tensor) in _tensor_samples(view, worst, now):
        grouped[importance].append((name, (run, block, layer, tensor), value))
    return grouped


def histograms(run: str, view: TensorView) -> list[tuple[Labels, list[int]]]:
    """Head-room histograms per tensor class: cumulative counts, +Inf last."""
    return [
        ((run, CLASSES[row]), [int(count) for count in np.cumsum(view.histogram[row])])
        for row in range(len(CLASSES))
        if view.histogram[row].any()
    ]


def _state_samples(run: RunMetrics) -> Iterator[tuple[Any, ...]]:
    if not run.run:
        return
    hello = run.hello
    if hello is not None:
        yield ("run_info", 1, hello.policy_name, run.mode, _framework(run), run.recipe, hello.host)
    for state in STATES:
        yield ("run_state", state == run.state, state)
    yield ("run_failed", run.has_failed)
    if run.expected_ranks:
        yield ("expected_ranks", run.expected_ranks)
    if run.open is not None:
        for severity in ("warn", "act"):
            yield ("open_findings", 0, "", "", severity)
        for finding in sorted(run.open):
            yield ("open_findings", 1, *finding)


def _run_samples(run: RunMetrics) -> Iterator[tuple[Any, ...]]:
    for reason, count in run.dropped.items():
        yield (SCALARS if count else ZEROS, "frames_dropped_total", count, reason)
    if not run.run:
        return
    for reason, count in run.unseen.items():
        yield (SCALARS if count else ZEROS, "frames_unseen_total", count, reason)
    for rank, said in sorted(run.hellos.items()):
        gpu, uuid = said.framework.get("gpu", ""), said.framework.get("gpu_uuid", "")
        yield (SCALARS, "rank_info", 1, str(rank), gpu, uuid)
    position = run.position()
    if position is not None:
        for name, value in zip(("attempt", "step", "last_step_timestamp_seconds"), position, strict=True):
            yield (SCALARS, name, value)
    for scalar, name in {
        **GAUGES,
        "observed_modules": "observed_modules",
        "expected_modules": "expected_modules",
    }.items():
        merged = run.gauge(scalar)
        if merged is not None:
            yield (SCALARS, name, merged)
    largest = run.largest("loss")
    if largest is not None:
        yield (SCALARS, "loss_max", largest[0])
        yield (SCALARS, "loss_max_rank", largest[1])
    overhead = run.overhead_ratio()
    if overhead is not None:
        yield (SCALARS, "overhead_ratio", overhead)
    for kind in ("statistics", "what_if", "shadow"):
        interval = run.gauge(f"{kind}_every")
        if interval is not None:
            yield (SCALARS, "sampling_interval_steps", interval, kind)
    for moment in ("exp_avg", "exp_avg_sq"):
        for figure in ("amax", "underflow_ratio"):
            held = run.gauge(f"{moment}_{figure}")
            if held is not None:
                yield (SCALARS, f"optimizer_state_{figure}", held, moment)
    for task, score in run.evaluations.items():
        if np.isfinite(score):
            yield (SCALARS, "evaluation_score", score, task)
    for name, value in (
        ("steps_total", run.steps), ("tokens_total", run.tokens), ("clipped_steps_total", run.clipped_steps),
        ("skipped_steps_total", run.skipped_steps), ("loss_spikes_total", run.loss_spikes),
        ("store_errors_total", run.store_errors),
    ):  # fmt: skip
        yield (SCALARS, name, value)
    for quantity in NONFINITE_QUANTITIES:
        yield (SCALARS, "nonfinite_total", run.nonfinite[quantity], quantity)
    for detector in DETECTORS:
        for cause in CAUSES:
            for severity in ("warn", "act"):
                count = run.findings[detector, cause, severity]
                yield (COUNTED if count else ZEROS, "findings_total", count, detector, cause, severity)
    endings = dict.fromkeys(
        [*((action, e) for action in ACTIONS for e in ("pending", *ENDINGS, "failed")), *run.actions]
    )
    for action, ending in endings:
        count = run.actions[action, ending]
        yield (COUNTED if count else ZEROS, "actions_total", count, action, ending)


def _tensor_samples(
    view: TensorView, worst: WorstLayers, now: float
) -> Iterator[tuple[int, str, float, tuple[str, str, str]]]:
    if not view.modules:
        return
    keys = list(zip(view.blocks, view.tensors, strict=True))
    groups = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    group_of = np.array([groups[key] for key in keys], dtype=np.intp)
    gauges: dict[str, tuple[Floats, np.ufunc]] = {
        "tensor_amax": (view.gauges["amax"], np.fmax),
        "tensor_amax_max_60s": (view.gauges["amax_max_60s"], np.fmax),
        "tensor_scale": (view.gauges["scale"], np.fmax),
        "tensor_shadow_error": (view.gauges["shadow_error"], np.fmax),
        "tensor_scale_spread_log2": (view.gauges["scale_spread"], np.fmax),
        "tensor_headroom_log2": (view.gauges["headroom"], np.fmin),
        "tensor_headroom_log2_min_60s": (view.gauges["headroom_min_60s"], np.fmin),
    }
    counters = {_ELEMENTS[name]: values for name, values in view.counts.items()}
    counters["tensor_clipped_steps_total"] = view.clipped_steps
    for name, values in counters.items():
        sums = np.zeros(len(groups), dtype=np.uint64)
        np.add.at(sums, group_of, values)
        for (block, tensor), total in zip(groups, sums.tolist(), strict=True):
            yield BLOCKS, name, float(total), (block, "", tensor)
    for name, (rows, pick) in gauges.items():
        extremes = np.full(len(groups), np.nan, dtype=np.float32)
        pick.at(extremes, group_of, rows)
        for (block, tensor), extreme in zip(groups, extremes.tolist(), strict=True):
            if extreme == extreme:  # not NaN
                yield BLOCKS, name, extreme, (block, "", tensor)
    chosen = set(worst.select(now, view.modules, view.gauges["headroom"], view.gauges["headroom_min_60s"]))
    for row, module in enumerate(view.modules):
        if module in chosen:
            labels = (view.blocks[row], module, view.tensors[row])
            for name, (rows, _) in gauges.items():
                if not np.isnan(rows[row]):
                    yield LAYERS, name, float(rows[row]), labels


def _framework(run: RunMetrics) -> str:
    versions = {} if run.hello is None else run.hello.framework
    for name in ("transformer_engine", "torch"):
        if versions.get(name):
            return f"{name} {versions[name]}"
    return ""
