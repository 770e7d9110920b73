"""The metric catalogue: the one place where names, types, labels, units and help are written down.

The exporter, the dashboards, the documentation and the tests read it. Naming follows the Prometheus
conventions: base units, `_total` for counters, no unit prefixes, one quantity a metric.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "fp8watch_"
TENSOR_LABELS = ("run", "block", "layer", "tensor")
"""`layer` is empty but for the worst K layers, so that the series stay within budget.

With an empty layer a series speaks of a block: gauges are the extreme over its layers, counters the sum. The worst
layers have gauges besides, never counters, so that summing a counter counts every element once.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric family; `name` is complete and, for counters, ends in `_total`."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ("run",)
    unit: str = ""


def _gauge(name: str, help: str, *labels: str, unit: str = "") -> Metric:
    return Metric(name=PREFIX + name, kind="gauge", help=help, labels=labels or ("run",), unit=unit)


def _counter(name: str, help: str, *labels: str, unit: str = "") -> Metric:
    return Metric(name=PREFIX + name, kind="counter", help=help, labels=labels or ("run",), unit=unit)


HEADROOM_BUCKETS = (-8.0, -4.0, -2.0, -1.0, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 24.0)
"""Upper bounds in powers of two; below 0 the tensor clips."""

CATALOGUE: tuple[Metric, ...] = (
    _gauge("build_info", "Version of the exporter; the value is 1.", "version", "wire_version"),
    _gauge("run_info", "Attributes of a run, to be joined on run; the value is 1.",
           "run", "policy", "mode", "framework", "recipe", "host"),
    _gauge("rank_info", "Which GPU a rank runs on; UUID is spelled as dcgm-exporter does; the value is 1.",
           "run", "rank", "gpu", "UUID"),
    _gauge("step", "Optimizer steps done; goes back at a rollback."),
    _gauge("attempt", "Grows at every rollback or restart."),
    _gauge("loss", "Training loss, mean over ranks; last finite value."),
    _gauge("loss_max", "Largest training loss of any rank; last finite values."),
    _gauge("loss_max_rank", "Rank that holds the largest training loss."),
    _gauge("grad_norm", "Global gradient norm before clipping; last finite value."),
    _gauge("learning_rate", "Learning rate in force, remedies included."),
    _gauge("clip_limit", "Gradient clipping limit in force, remedies included."),
    _gauge("loss_scale", "Loss scale in force."),
    _gauge("update_rms", "Root mean square of the last parameter update, from a sample of the parameters."),
    _gauge("tensor_amax", "Largest magnitude in a quantized tensor, over the block where layer is empty; "
           "last finite value.", *TENSOR_LABELS),
    _gauge("tensor_amax_max_60s", "Maximum of fp8watch_tensor_amax over 60 seconds.", *TENSOR_LABELS),
    _gauge("tensor_scale", "Scale a tensor was multiplied by before its last FP8 cast, the largest of the block "
           "where layer is empty.", *TENSOR_LABELS),
    _gauge("tensor_headroom_log2", "log2(fp8_max / (amax * scale)), the smallest of the block where layer is empty; "
           "negative: the tensor clipped.", *TENSOR_LABELS),
    _gauge("tensor_headroom_log2_min_60s", "Minimum of fp8watch_tensor_headroom_log2 over 60 seconds.",
           *TENSOR_LABELS),
    _gauge("bf16_modules", "FP8 modules that run in BF16 now."),
    _gauge("observed_modules", "FP8 modules whose numbers are seen."),
    _gauge("expected_modules", "FP8 modules that exist."),
    _gauge("last_step_timestamp_seconds", "When the last step ended, Unix time.", unit="seconds"),
    _gauge("overhead_ratio", "Share of a step spent inside fp8watch on the training thread.", unit="ratio"),
    _gauge("run_state", "1 for the state a run is in: running, ended, lost, halted.", "run", "state"),
    _gauge("evaluation_score", "Evaluation score as recorded by the trainer.", "run", "task"),
    _counter("steps_total", "Optimizer steps seen, repeated ones included."),
    _counter("tokens_total", "Tokens trained on, repeated ones included."),
    _counter("quantized_elements_total", "Elements cast to FP8 in sampled steps.", *TENSOR_LABELS),
    _counter("saturated_elements_total", "Elements clipped to the format's maximum in sampled steps.", *TENSOR_LABELS),
    _counter("underflowed_elements_total", "Non-zero elements that became zero in sampled steps.", *TENSOR_LABELS),
    _counter("nonfinite_total", "Non-finite values seen, by quantity: loss, grad_norm, update_rms, parameter "
             "(steps); amax, scale (tensors); tensor (elements, in sampled steps).",
             "run", "quantity"),
    _counter("tensor_clipped_steps_total", "Steps in which amax * scale exceeded the format's maximum (exact).",
             *TENSOR_LABELS),
    _counter("clipped_steps_total", "Steps whose gradient was clipped."),
    _counter("skipped_steps_total", "Optimizer steps skipped because the gradient was not finite."),
    _counter("loss_spikes_total", "Incidents of the loss_spike detector."),
    _counter("findings_total", "Findings.", "run", "detector", "cause", "severity"),
    _counter("actions_total", "Actions: outcome pending counts each when it is applied, the others where it ended "
             "(helped, no_effect, reverted; failed, vetoed, expired, unavailable, refused: not applied).",
             "run", "action", "outcome"),
    _counter("frames_dropped_total", "Frames that were lost, by reason.", "run", "reason"),
    _counter("store_errors_total", "Writes to the store that failed.", "run"),
    _counter("agent_series_dropped_total", "Series left out to stay within the series budget.", "run"),
    Metric(name=PREFIX + "headroom_log2", kind="histogram", labels=("run", "tensor"),
           help="Head-room of every tensor in every step, in powers of two."),
)  # fmt: skip

BY_NAME = {metric.name: metric for metric in CATALOGUE}
