"""The metric catalogue: the one place where names, types, labels, units and help are written down.

The exporter, the dashboards, the documentation and the tests read it. Naming follows the Prometheus conventions: base
units, `_total` for counters, no unit prefixes, one quantity per metric.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "fp8watch_"
TENSOR_LABELS = ("run", "block", "layer", "tensor")
"""`layer` is empty except for the worst K layers, so that the series stay within their budget.

A series with an empty layer describes a block: gauges are the extreme over its layers, counters the sum. The worst
layers have gauges of their own but never counters, so that a sum over a counter counts every element once.
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
    _gauge("fp8_parameter_ratio", "Share of the linear layers' weights that FP8 layers hold.", unit="ratio"),
    _gauge("sampling_overhead_ratio", "Measured share of the step time that element counts, what-if figures and shadow "
           "probes take.", unit="ratio"),
    _gauge("sampling_interval_steps", "Steps between samples, by kind (statistics, what_if, shadow); 0: never.",
           "run", "kind"),
    _gauge("tensor_shadow_error", "Relative error of the layer's forward GEMM against BF16 on the same input, at its "
           "last probe; the largest of the block where layer is empty.", *TENSOR_LABELS),
    _gauge("tensor_scale_spread_log2", "Bits between the largest and the smallest scale of a tensor with one scale per "
           "row or block, in the last sampled step; the largest of the block where layer is empty.", *TENSOR_LABELS),
    _gauge("optimizer_state_amax", "Largest magnitude in an FP8 moment of the optimizer.", "run", "moment"),
    _gauge("optimizer_state_underflow_ratio", "Share of an FP8 moment's elements that are zero although others are "
           "not: an upper bound of what underflowed.", "run", "moment", unit="ratio"),
    _gauge("expected_ranks", "Number of ranks of the run on all nodes, as the ranks report it."),
    _gauge("run_state", "1 for the state a run is in: running, ended, lost, halted.", "run", "state"),
    _gauge("run_failed", "1 once a rank has left with an error in this attempt, else 0."),
    _gauge("open_findings", "1 for each open finding. The process that judges a run also has a series with empty "
           "detector and cause, always 0, so that a sum over a run is 0 and not absent.",
           "run", "detector", "cause", "severity"),
    _gauge("evaluation_score", "Evaluation score as recorded by the trainer.", "run", "task"),
    _counter("steps_total", "Optimizer steps seen, repeated ones included."),
    _counter("tokens_total", "Tokens trained on, repeated ones included."),
    _counter("quantized_elements_total", "Elements cast to FP8 in sampled steps.", *TENSOR_LABELS),
    _counter("saturated_elements_total", "Elements clipped to the format's maximum in sampled steps.", *TENSOR_LABELS),
    _counter("underflowed_elements_total", "Non-zero elements that became zero in sampled steps.", *TENSOR_LABELS),
    _counter("scaled_blocks_total", "Rows or blocks with their own scale that were cast in sampled steps.",
             *TENSOR_LABELS),
    _counter("clipped_blocks_total", "Rows or blocks with their own scale in which an element was clipped, in sampled "
             "steps.", *TENSOR_LABELS),
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
    _counter("frames_unseen_total", "Frames of finished steps that no detector saw, by reason: missing (lost on the "
             "way, for whatever reason), late (after their step was judged), superseded, unannounced, "
             "detectors_failed.",
             "run", "reason"),
    _counter("store_errors_total", "Writes to the store that failed.", "run"),
    _counter("agent_series_dropped_total", "Series left out to stay within the series budget; with an empty run, "
             "of what is not kept or shown at all.", "run"),
    _gauge("agent_redis_up", "1 while Redis accepts what the node's agent sends; 0: it is spooled to disk.", "node"),
    _gauge("agent_spool_bytes", "Bytes spooled on the node's disk until Redis accepts them.", "node", unit="bytes"),
    _counter("agent_spool_errors_total", "Entries that could not be written to disk and wait in memory.", "node"),
    _counter("agent_redis_errors_total", "Calls to Redis that failed, by reason.", "node", "reason"),
    _counter("agent_sent_total", "Messages that Redis has accepted.", "node"),
    _counter("agent_sent_bytes_total", "Bytes of the messages that Redis has accepted.", "node", unit="bytes"),
    _counter("agent_replayed_total", "Messages sent from the spool after Redis was away.", "node"),
    _counter("agent_lost_total", "Messages that never reached Redis, by reason.", "node", "reason"),
    _gauge("gpu_observable", "1 when the node's GPUs are read through NVML; 0: nothing is known of them.", "node"),
    _gauge("gpu_power_watts", "Power drawn.", "node", "gpu", "UUID", unit="watts"),
    _gauge("gpu_sm_clock_hertz", "Clock of the streaming multiprocessors.", "node", "gpu", "UUID", unit="hertz"),
    _gauge("gpu_memory_used_bytes", "Memory in use.", "node", "gpu", "UUID", unit="bytes"),
    _counter("gpu_energy_joules_total", "Energy used since the driver was loaded.", "node", "gpu", "UUID",
             unit="joules"),
    _counter("gpu_ecc_uncorrected_total", "Memory errors that could not be corrected.", "node", "gpu", "UUID"),
    _counter("gpu_xid_errors_total", "Critical errors reported by the driver, by XID number.",
             "node", "gpu", "UUID", "xid"),
    _gauge("energy_per_token_joules", "Energy used by this node's GPUs per token of the run, over the last minute.",
           "run", "node", unit="joules"),
    _gauge("controller_active", "1 on the active controller, 0 on a standby.", "holder"),
    _gauge("controller_term", "Term of the lease that the controller holds or saw last.", "holder"),
    _counter("controller_takeovers_total", "Times this controller became the active one.", "holder"),
    _counter("controller_redis_errors_total", "Calls to Redis that failed, by reason.", "holder", "reason"),
    _counter("controller_entries_total", "Messages of agents processed."),
    _counter("controller_entries_refused_total", "Messages of agents refused, by reason.",
             "run", "reason"),
    _counter("controller_set_aside_total", "Times the run could not be processed and was set aside for a while."),
    _counter("controller_claimed_total", "Messages that another controller had read but not finished."),
    _counter("controller_groups_recreated_total", "Times the consumer group had disappeared and was recreated."),
    _gauge("controller_lag_entries", "Messages in Redis not yet read by the controller."),
    _gauge("controller_delay_seconds", "Time between the creation of a frame and its judgement, for the latest frame.",
           unit="seconds"),
    Metric(name=PREFIX + "headroom_log2", kind="histogram", labels=("run", "tensor"),
           help="Head-room of every tensor in every step, in powers of two."),
)  # fmt: skip

BY_NAME = {metric.name: metric for metric in CATALOGUE}
