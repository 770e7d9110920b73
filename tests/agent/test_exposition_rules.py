"""Rules that the whole exposition keeps: closed label values, one registry a reporter, node-level metrics by name."""

from __future__ import annotations

import time
from collections import defaultdict

import hand_made as make
import prometheus_client
import pytest

from fp8watch.metrics import BY_NAME
from fp8watch.records import ACTIONS, DETECTORS, ActionRecord, Finding, NodeFrame
from fp8watch_agent.exporter import Exporter
from fp8watch_agent.families import CAUSES, Family
from fp8watch_agent.metrics_state import MetricsState
from fp8watch_agent.run_metrics import DROP_REASONS, NONFINITE_QUANTITIES, STATES

UNSEEN = ("late", "missing", "superseded", "unannounced", "detectors_failed")
CLOSED = {
    "detector": DETECTORS, "cause": CAUSES, "severity": ("warn", "act"), "action": ACTIONS, "state": STATES,
    "quantity": NONFINITE_QUANTITIES, "reason": (*DROP_REASONS, *UNSEEN),
    "tensor": ("input", "weight", "output", "grad_output", "grad_input"),
    "outcome": ("pending", "helped", "no_effect", "reverted", "failed", "vetoed", "expired", "unavailable", "refused"),
}  # fmt: skip


# case: PRM-14
def test_no_label_takes_a_new_value_each_step() -> None:
    """Steps, times, paths and free text never become label values, however long a run is."""
    state = MetricsState(clock=time.monotonic)
    state.observe(make.hello("r"))
    state.observe(make.layout("r", blocks=3))
    counts = []
    for step in range(1, 1001):
        state.observe(make.frame("r", step, 9, amax=1.0 + step / 1000, scale=448.0))
        if step % 50 == 0:
            state.record(
                Finding(id=f"f{step}", run="r", attempt=0, step=step, onset_step=step, detector="loss_spike",
                        severity="act", cause="data", evidence={"why": f"at step {step}"})
            )  # fmt: skip
            state.record(
                ActionRecord(id=f"a{step}", run="r", attempt=0, action="rewarm", params={"x": step}, rule=f"r{step}",
                             finding=f"f{step}", decided_step=step, status="applied", reason=f"since step {step}")
            )  # fmt: skip
            counts.append(sum(len(family.samples) for family in state.snapshot()))
    assert len(set(counts[2:])) == 1, "the number of series does not grow with steps"
    seen: dict[str, set[str]] = defaultdict(set)
    for family in state.snapshot():
        for labels, _ in family.samples:
            for name, value in zip(family.metric.labels, labels, strict=True):
                seen[name].add(value)
    for name, allowed in CLOSED.items():
        assert seen[name] <= {*allowed, ""}, name
    assert seen["block"] == {"0", "1", "2"}
    assert len(seen["layer"]) <= 11


# case: PRM-08
def test_any_number_of_reporters_live_in_one_process() -> None:
    default = set(prometheus_client.REGISTRY._names_to_collectors)  # type: ignore[attr-defined]
    exporters = []
    for number in range(3):
        state = MetricsState(clock=time.monotonic)
        state.observe(make.hello(f"r{number}"))
        exporter = Exporter(state)
        exporter.start("127.0.0.1", 0)
        exporters.append(exporter)
    for number, exporter in enumerate(exporters):
        shown = make.scrape(exporter.url)
        assert any(f'run="r{number}"' in name for name in shown)
        assert not any(f'run="r{other}"' in name for other in range(3) if other != number for name in shown)
        exporter.stop()
    assert set(prometheus_client.REGISTRY._names_to_collectors) == default  # type: ignore[attr-defined]


# case: DST-05
def test_the_metric_is_the_jobs_and_the_outlier_is_named() -> None:
    state = MetricsState(clock=time.monotonic)
    for rank, loss in enumerate((1.0, 1.0, 1.0, 9.0)):
        state.observe(make.hello("r", rank=rank, world_size=4))
        state.observe(make.frame("r", 1, rank=rank, scalars={"loss": loss}))
    shown = {f.metric.name: f.samples for f in state.snapshot() if f.samples}
    assert shown["fp8watch_loss"] == [(("r",), 3.0)]
    assert shown["fp8watch_loss_max"] == [(("r",), 9.0)]
    assert shown["fp8watch_loss_max_rank"] == [(("r",), 3.0)]


def test_a_nodes_frame_feeds_the_tensors_and_ranks_the_scalars() -> None:
    state = MetricsState(clock=time.monotonic)
    for rank in range(2):
        state.observe(make.hello("r", rank=rank, world_size=2))
        state.observe(make.frame("r", 1, rank=rank, scalars={"loss": 1.0 + rank, "tokens": 10.0}))
    state.observe_node(make.layout("r"))
    columns = make.frame("r", 1, 6, amax=7.0, scale=32.0, quantized=100, saturated=4).columns
    state.observe_node(
        NodeFrame(run="r", attempt=0, node="n", rank=0, step=1, layout_id=1, time_unix=1.0, ranks=[0, 1],
                  scalars=[{}, {}], columns=columns)
    )  # fmt: skip
    shown = {(f.metric.name, labels): value for f in state.snapshot() for labels, value in f.samples}
    assert shown["fp8watch_tensor_amax", ("r", "0", "", "input")] == 7.0
    assert shown["fp8watch_saturated_elements_total", ("r", "0", "", "input")] == 4
    assert shown["fp8watch_tensor_headroom_log2", ("r", "0", "", "input")] == 1.0
    assert shown["fp8watch_loss", ("r",)] == 1.5
    assert shown["fp8watch_tokens_total", ("r",)] == 20
    assert shown["fp8watch_steps_total", ("r",)] == 1


@pytest.mark.parametrize("name", ["agent_redis_up", "agent_spool_bytes"])
def test_what_is_said_of_the_process_is_asked_at_every_scrape(name: str) -> None:
    values = iter([1.0, 2.0])
    metric = BY_NAME[f"fp8watch_{name}"]
    state = MetricsState(
        clock=time.monotonic, about_process=lambda: [Family(metric=metric, samples=[(("n",), next(values))])]
    )
    for expected in (1.0, 2.0):
        (family,) = [family for family in state.snapshot() if family.metric is metric]
        assert family.samples == [(("n",), expected)]
