"""Intervals, cost and findings of closer looks in /metrics."""

from __future__ import annotations

import hand_made as make
import msgspec
import numpy as np

from fp8watch.columns import pack
from fp8watch_agent.metrics_state import MetricsState


def test_samples_are_exported_and_kept_between_samples():
    state = MetricsState(clock=lambda: 0.0)
    layout = make.layout("r", blocks=2)
    state.observe(make.hello("r"))
    state.observe(layout)
    size = len(layout.columns)
    scalars = {
        "loss": 1.0, "sampling_ratio": 0.004, "statistics_every": 10.0, "what_if_every": 100.0, "shadow_every": 400.0,
        "exp_avg_amax": 3e-3, "exp_avg_underflow_ratio": 0.25, "exp_avg_underflow_ratio_max": 0.5,
        "fp8_parameter_share": 0.9,
    }  # fmt: skip
    frame = make.frame("r", 1, size, amax=2.0, scale=100.0, scalars=scalars)
    valid = np.zeros(size, dtype=np.bool_)
    valid[0] = True
    error = pack(np.full(size, 0.037), "f4", valid)
    state.observe(msgspec.structs.replace(frame, columns={**frame.columns, "shadow_error": error}))
    state.observe(make.frame("r", 2, size, amax=2.0, scale=100.0))
    found = {family.metric.name: dict(family.samples) for family in state.snapshot()}
    assert found["fp8watch_sampling_overhead_ratio"] == {("r",): 0.004}
    assert found["fp8watch_sampling_interval_steps"] == {
        ("r", "statistics"): 10.0, ("r", "what_if"): 100.0, ("r", "shadow"): 400.0,
    }  # fmt: skip
    assert found["fp8watch_optimizer_state_amax"] == {("r", "exp_avg"): 3e-3}
    assert found["fp8watch_optimizer_state_underflow_ratio"] == {("r", "exp_avg"): 0.25}
    assert found["fp8watch_fp8_parameter_ratio"] == {("r",): 0.9}
    probed = found["fp8watch_tensor_shadow_error"]
    assert {labels[1:] for labels in probed} == {("0", "", "input")} | {
        labels[1:] for labels in probed if labels[2] == layout.columns[0].module
    }
    assert all(abs(value - 0.037) < 1e-6 for value in probed.values())  # what was not probed has no series
