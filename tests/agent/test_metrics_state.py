"""What is exported for given messages: merging, windows, counters, budget, end of runs."""

from __future__ import annotations

import math
from fractions import Fraction

import hand_made as make
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8watch.errors import WireError
from fp8watch.metrics import BY_NAME
from fp8watch.records import ActionRecord, Evaluation, Finding, Layout, RunRecord
from fp8watch_agent.metrics_state import MetricsState
from fp8watch_agent.window import SlidingExtreme


class _Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class _Bench:
    """A state with a clock that is moved by hand."""

    def __init__(self, **options: float) -> None:
        self.clock = _Clock()
        self.state = MetricsState(clock=self.clock, **options)  # type: ignore[arg-type]

    def get(self, name: str, **labels: str) -> float | None:
        """Value of the one series of `fp8watch_<name>` with these labels; a label not given is empty or `r`."""
        metric = BY_NAME[f"fp8watch_{name}"]
        wanted = tuple({"run": "r", **labels}.get(label, "") for label in metric.labels)
        for family in self.state.snapshot():
            if family.metric is metric:
                values = [value for found, value in family.samples if found == wanted]
                assert len(values) <= 1, "a series twice"
                return values[0] if values else None
        raise AssertionError(name)

    def num_series(self) -> int:
        return sum(
            len(family.samples) + sum(len(counts) for _, counts in family.buckets) for family in self.state.snapshot()
        )


@pytest.fixture
def bench() -> _Bench:
    return _Bench()


def _start(bench: _Bench, layout: Layout | None = None, *, ranks: int = 1) -> None:
    for rank in range(ranks):
        bench.state.observe(make.hello("r", rank=rank, world_size=ranks))
        if layout is not None:
            bench.state.observe(make.layout("r", rank=rank))


def test_gauges_keep_the_last_finite_value_and_the_rest_is_counted(bench: _Bench) -> None:  # case: PRM-11
    _start(bench, make.layout("r"))
    bench.state.observe(make.frame("r", 1, 6, amax=1.0, scale=100.0, scalars={"loss": 2.5, "grad_norm": 0.5}))
    bad = {"loss": math.nan, "grad_norm": math.inf, "param_nonfinite": 1.0, "update_rms": -math.inf}
    bench.state.observe(
        make.frame("r", 2, 6, amax=[math.nan, math.inf, 1.0, 1.0, 1.0, 1.0], scale=[math.inf] + [100.0] * 5,
                   nonfinite=[7, 0, 0, 0, 0, 0], scalars=bad)
    )  # fmt: skip
    for family in bench.state.snapshot():
        assert all(math.isfinite(value) for _, value in family.samples), family.metric.name
    assert bench.get("loss") == 2.5
    assert bench.get("grad_norm") == 0.5
    assert bench.get("tensor_amax", block="0", tensor="input") == 1.0
    assert bench.get("step") == 2
    counted = {"loss": 1, "grad_norm": 1, "update_rms": 1, "parameter": 1, "amax": 2, "scale": 1, "tensor": 7}
    for quantity, count in counted.items():
        assert bench.get("nonfinite_total", quantity=quantity) == count, quantity


def test_not_observed_is_absent_and_never_zero(bench: _Bench) -> None:
    _start(bench, make.layout("r"))
    bench.state.observe(make.frame("r", 1, 6, amax=[1.0, None, None] * 2, scalars={}))
    assert bench.get("tensor_amax", block="0", tensor="input") == 1.0
    assert bench.get("tensor_amax", block="0", tensor="weight") is None
    assert bench.get("tensor_scale", block="0", tensor="input") is None
    assert bench.get("tensor_headroom_log2", block="0", tensor="input") is None
    assert bench.get("quantized_elements_total", block="0", tensor="input") is None
    assert bench.get("loss") is None


def test_block_level_takes_the_extreme_and_the_sum_of_its_layers(bench: _Bench) -> None:
    bench.state.observe(make.hello("r"))
    bench.state.observe(make.layout("r", blocks=1, modules=("up", "down"), tensors=("input",)))
    bench.state.observe(make.frame("r", 1, 2, amax=[1.0, 2.0], scale=[50.0, 300.0], quantized=100, saturated=[3, 4]))
    at = {"block": "0", "tensor": "input"}
    assert bench.get("tensor_amax", **at) == 2.0
    assert bench.get("tensor_scale", **at) == 300.0
    assert bench.get("tensor_headroom_log2", **at) == pytest.approx(math.log2(448 / 600))
    assert bench.get("tensor_headroom_log2", layer="blocks.0.up", **at) == pytest.approx(math.log2(448 / 50))
    assert bench.get("quantized_elements_total", **at) == 200
    assert bench.get("saturated_elements_total", **at) == 7
    assert bench.get("saturated_elements_total", layer="blocks.0.up", **at) is None
    assert bench.get("tensor_clipped_steps_total", **at) == 1


@given(amax=st.floats(2.0**-20, 2.0**20, width=32), scale=st.floats(2.0**-20, 2.0**20, width=32))
def test_clipped_steps_are_exact(amax: float, scale: float) -> None:
    bench = _Bench()
    bench.state.observe(make.hello("r"))
    bench.state.observe(make.layout("r", blocks=1, tensors=("input",)))
    bench.state.observe(make.frame("r", 1, 1, amax=amax, scale=scale))
    clips = Fraction(amax) * Fraction(scale) > 448
    assert bench.get("tensor_clipped_steps_total", block="0", tensor="input") == int(clips)


def test_ranks_are_merged_and_a_dead_one_no_longer_counts(bench: _Bench) -> None:  # case: PRM-04
    _start(bench, make.layout("r"), ranks=4)
    for step in (1, 2):
        for rank in range(4):
            bench.state.observe(
                make.frame("r", step, 6, rank=rank, amax=400.0 if rank == 3 else 2.0, scale=2.0, quantized=10,
                           scalars={"loss": 1.0 + rank, "tokens": 5.0})
            )  # fmt: skip
    at = {"block": "1", "tensor": "weight"}
    assert bench.get("tensor_amax", **at) == 400.0
    assert bench.get("quantized_elements_total", **at) == 80
    assert bench.get("tensor_clipped_steps_total", **at) == 2  # a step counts once, whatever number of ranks clip
    assert bench.get("loss") == 2.5
    assert (bench.get("loss_max"), bench.get("loss_max_rank")) == (4.0, 3.0)
    assert bench.get("steps_total") == 2
    assert bench.get("tokens_total") == 40
    bench.state.rank_left("r", 3)
    assert bench.get("tensor_amax", **at) == 2.0
    assert bench.get("loss") == 2.0
    assert bench.get("rank_info", rank="3", gpu="0", UUID="GPU-1") is None
    assert bench.get("rank_info", rank="2", gpu="0", UUID="GPU-1") == 1.0


def test_ranks_are_matched_by_name_and_not_by_position(bench: _Bench) -> None:
    for rank, modules in ((0, ("up", "down")), (1, ("down", "up"))):
        bench.state.observe(make.hello("r", rank=rank))
        bench.state.observe(make.layout("r", rank=rank, blocks=1, modules=modules, tensors=("input",)))
    bench.state.observe(make.frame("r", 1, 2, rank=0, amax=[1.0, 10.0], scale=1.0))
    bench.state.observe(make.frame("r", 1, 2, rank=1, amax=[11.0, 2.0], scale=1.0))
    assert bench.get("tensor_amax", block="0", layer="blocks.0.up", tensor="input") == 2.0
    assert bench.get("tensor_amax", block="0", layer="blocks.0.down", tensor="input") == 11.0


def test_window_twins_see_one_step_until_a_minute_has_passed_however_often_read(bench: _Bench) -> None:
    bench.state.observe(make.hello("r"))
    bench.state.observe(make.layout("r", blocks=1, tensors=("input",)))
    at = {"block": "0", "tensor": "input"}
    for step in range(1, 1000):
        bench.state.observe(make.frame("r", step, 1, amax=100.0 if step == 300 else 1.0, scale=224.0))
        bench.clock.now += 0.1
    assert bench.get("tensor_amax", **at) == 1.0
    since = (999 - 300) * 0.1
    assert since > 61
    assert bench.get("tensor_amax_max_60s", **at) == 1.0
    bench.state.observe(make.frame("r", 1000, 1, amax=100.0, scale=224.0))
    bench.clock.now += 0.1
    bench.state.observe(make.frame("r", 1001, 1, amax=1.0, scale=224.0))
    bench.clock.now += 59.5
    for _ in range(3):
        assert bench.get("tensor_amax_max_60s", **at) == 100.0
        assert bench.get("tensor_headroom_log2_min_60s", **at) == pytest.approx(1 - math.log2(100))
        assert bench.get("tensor_headroom_log2", **at) == pytest.approx(1.0)
    bench.clock.now += 2.0
    assert bench.get("tensor_amax_max_60s", **at) is None


@given(st.lists(st.tuples(st.floats(0, 20), st.floats(-100, 100, width=32)), min_size=1, max_size=60))
def test_window_covers_at_least_60_and_at_most_61_seconds(points: list[tuple[float, float]]) -> None:
    window = SlidingExtreme(is_maximum=True, size=1)
    now, history = 0.0, []
    for gap, value in points:
        now += gap
        window.update(now, np.array([0]), np.array([value], dtype=np.float32))
        history.append((now, value))
        least = max(value for at, value in history if now - at <= 60)
        most = max(value for at, value in history if now - at <= 61)
        assert least <= window.read(now)[0] <= most


def test_a_module_in_bf16_has_no_scale(bench: _Bench) -> None:
    bench.state.observe(make.hello("r"))
    bench.state.observe(make.layout("r", blocks=2, tensors=("input",)))
    bench.state.observe(make.frame("r", 1, 2, amax=2.0, scale=448.0, high_precision=0))
    assert bench.get("tensor_headroom_log2", block="0", tensor="input") == -1.0
    bench.state.observe(make.frame("r", 2, 2, amax=3.0, scale=448.0, high_precision=[1, 0]))
    assert bench.get("tensor_headroom_log2", block="0", tensor="input") is None
    assert bench.get("tensor_amax", block="0", tensor="input") == 3.0
    assert bench.get("tensor_clipped_steps_total", block="0", tensor="input") == 1
    assert bench.get("tensor_clipped_steps_total", block="1", tensor="input") == 2


def test_a_rollback_goes_back_in_step_but_no_counter_does(bench: _Bench) -> None:
    _start(bench)
    for step in range(1, 11):
        bench.state.observe(make.frame("r", step))
    bench.state.observe(make.hello("r", attempt=1, step=5))
    for step in (6, 7):
        bench.state.observe(make.frame("r", step, attempt=1))
    assert (bench.get("attempt"), bench.get("step"), bench.get("steps_total")) == (1.0, 7.0, 12.0)


def test_a_frame_of_an_unknown_layout_counts_its_scalars_only(bench: _Bench) -> None:
    _start(bench, make.layout("r"))
    bench.state.observe(make.frame("r", 1, 3, layout_id=9, amax=1.0))
    assert bench.get("steps_total") == 1
    assert bench.get("tensor_amax", block="0", tensor="input") is None


def test_a_column_that_does_not_fit_is_refused(bench: _Bench) -> None:
    _start(bench, make.layout("r"))
    with pytest.raises(WireError, match="5 values, its layout 6"):
        bench.state.observe(make.frame("r", 1, 5, amax=1.0))


def test_headroom_histogram_counts_every_tensor_of_every_step(bench: _Bench) -> None:
    _start(bench, make.layout("r"))
    for step in (1, 2):
        bench.state.observe(make.frame("r", step, 6, amax=1.0, scale=[896.0, 448.0, 224.0] * 2))
    families = {family.metric.name: family for family in bench.state.snapshot()}
    buckets = dict(families["fp8watch_headroom_log2"].buckets)
    assert buckets["r", "input"][2:4] == [0, 4]  # -1 falls into le="-1"
    assert buckets["r", "weight"][3:5] == [0, 4]  # 0 falls into le="0"
    assert buckets["r", "grad_output"][-1] == 4
    assert ("r", "output") not in buckets


def test_findings_and_actions_count_once(bench: _Bench) -> None:
    _start(bench)
    assert bench.get("findings_total", detector="loss_spike", cause="data", severity="act") == 0.0
    assert bench.get("actions_total", action="rollback", outcome="helped") == 0.0
    finding = Finding(
        id="f1", run="r", attempt=0, step=5, onset_step=4, detector="loss_spike", severity="act", cause="data",
        incident="i1",
    )  # fmt: skip
    for _ in range(2):
        bench.state.record(finding)
    action = ActionRecord(
        id="a1", run="r", attempt=0, action="rollback", params={}, rule="x", finding="f1", decided_step=5
    )
    for changes in (
        {"status": "proposed"}, {"status": "sent"}, {"status": "applied"}, {"status": "applied", "readback": "ok"},
        {"status": "applied", "outcome": "helped"}, {"status": "applied", "outcome": "helped"},
    ):  # fmt: skip
        bench.state.record(msgspec.structs.replace(action, **changes))
    bench.state.record(msgspec.structs.replace(action, id="a2", status="vetoed"))
    assert bench.get("findings_total", detector="loss_spike", cause="data", severity="act") == 1
    assert bench.get("loss_spikes_total") == 1
    assert bench.get("actions_total", action="rollback", outcome="pending") == 1
    assert bench.get("actions_total", action="rollback", outcome="helped") == 1
    assert bench.get("actions_total", action="rollback", outcome="vetoed") == 1


def test_dropped_frames_are_the_ranks_own_counts(bench: _Bench) -> None:
    _start(bench, ranks=2)
    bench.state.observe(make.frame("r", 1, dropped={"queue_full": 3}))
    bench.state.observe(make.frame("r", 1, rank=1, dropped={"queue_full": 1}))
    bench.state.observe(make.frame("r", 2, dropped={"queue_full": 5}))
    assert bench.get("frames_dropped_total", reason="queue_full") == 6
    bench.state.observe(make.hello("r", pid=1))  # the trainer was started again and counts from 0
    bench.state.observe(make.frame("r", 3, dropped={"queue_full": 2}))
    bench.state.drop("r", "malformed")
    assert bench.get("frames_dropped_total", reason="queue_full") == 8
    assert bench.get("frames_dropped_total", reason="malformed") == 1


def test_states_and_scalars_of_a_run(bench: _Bench) -> None:
    hello = make.hello("r", policy_name="auto")
    bench.state.observe(hello)
    bench.state.observe(make.layout("r"))
    bench.state.observe(Evaluation(run="r", attempt=0, step=1, scores={"hellaswag": 0.4, "broken": math.nan}))
    scalars = {"grad_norm": 2.0, "clip_limit": 1.0, "step_seconds": 0.5, "overhead_seconds": 0.001, "bf16_modules": 1.0}
    bench.state.observe(make.frame("r", 1, scalars={**scalars, "update_skipped": 1.0, "learning_rate": 3e-4}))
    assert bench.get("overhead_ratio") == pytest.approx(0.002)
    assert (bench.get("clipped_steps_total"), bench.get("skipped_steps_total")) == (1, 1)
    assert (bench.get("expected_modules"), bench.get("bf16_modules")) == (2, 1)
    assert bench.get("evaluation_score", task="hellaswag") == 0.4
    assert bench.get("evaluation_score", task="broken") is None
    assert bench.get("run_state", state="running") == 1
    info = {"policy": "auto", "mode": "observe", "framework": "torch 2.0", "recipe": "delayed", "host": "host-a"}
    assert bench.get("run_info", **info) == 1
    bench.state.record(RunRecord(run="r", state="halted", hello=hello, started_unix=0.0, updated_unix=0.0))
    bench.state.run_over("r", "ended")
    assert (bench.get("run_state", state="halted"), bench.get("run_state", state="ended")) == (1, 0)


# case: PRM-02
# case: PRM-13
# case: PRM-15
def test_an_ended_run_disappears_and_many_short_runs_leave_nothing() -> None:
    bench = _Bench(ended_ttl_seconds=600.0)
    for number in range(50):
        name = f"run-{number}"
        bench.state.observe(make.hello(name))
        bench.state.observe(make.layout(name))
        bench.state.observe(make.frame(name, 1, 6, amax=1.0, scale=1.0))
        bench.state.run_over(name, "ended")
        bench.clock.now += 300.0
        bench.state.snapshot()
    assert bench.num_series() <= 5000
    bench.clock.now += 601.0
    assert bench.num_series() == 1  # build_info


def test_the_series_budget_holds_and_what_goes_is_counted() -> None:
    bench = _Bench(series_budget=500)
    bench.state.observe(make.hello("r"))
    modules = tuple(f"m{n}" for n in range(20))
    bench.state.observe(make.layout("r", blocks=30, modules=modules))
    bench.state.observe(make.frame("r", 1, 30 * 20 * 3, amax=1.0, scale=1.0, quantized=1, saturated=1, underflowed=1))
    assert bench.num_series() <= 500
    dropped = bench.get("agent_series_dropped_total")
    assert dropped is not None
    assert dropped > 100
    assert bench.get("agent_series_dropped_total") == dropped  # left out again is not left out anew
    assert bench.get("loss") == 2.0


def test_a_model_of_1680_tensors_stays_within_the_default_budget() -> None:
    bench = _Bench()
    bench.state.observe(make.hello("r"))
    modules = tuple(f"m{n}" for n in range(14))
    bench.state.observe(make.layout("r", blocks=40, modules=modules))
    bench.state.observe(make.frame("r", 1, 1680, amax=1.0, scale=1.0, quantized=1, saturated=1, underflowed=1))
    assert bench.num_series() <= 5000
    assert bench.get("agent_series_dropped_total") == 0
