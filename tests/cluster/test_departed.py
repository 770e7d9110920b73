"""Counters by run on a controller's /metrics: they go ten minutes after the run, and are bounded at any time."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import hand_made as make
import pytest

from fp8watch.controller.cluster import metrics
from fp8watch.controller.cluster.departed import Departed
from fp8watch.controller.cluster.metrics import ENDED_TTL_SECONDS, ControllerExporter, Tally
from fp8watch.records import Finding, RunRecord

BY_RUN = {
    "controller_entries_total", "controller_claimed_total", "controller_groups_recreated_total",
    "controller_entries_refused_total", "controller_set_aside_total", "controller_lag_entries",
    "controller_delay_seconds", "store_errors_total",
}  # fmt: skip


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Controller:
    """What the exporter reads of a `ClusterProgram` that has followed some runs."""

    def __init__(self) -> None:
        self.clock, self.runs_followed = Clock(), set[str]()
        counts: dict[str, Counter[Any]] = {name: Counter() for name in ("taken", "claimed", "recreated", "refused")}
        inflow = SimpleNamespace(**counts, following=lambda: set(self.runs_followed))
        self.program: Any = SimpleNamespace(
            is_active=True, lease=SimpleNamespace(holder="c0", term=1), inflow=inflow, takeovers=1, errors=Counter(),
            aside=SimpleNamespace(times=Counter()), lags={}, delays={}, runs=SimpleNamespace(store_errors=Counter()),
        )  # fmt: skip
        self.tally = Tally(self.clock)
        self.exporter = ControllerExporter(self.program, self.tally)

    def counts(self) -> list[Any]:
        program, inflow = self.program, self.program.inflow
        return [inflow.taken, inflow.claimed, inflow.recreated, program.aside.times, program.lags, program.delays,
                program.runs.store_errors, inflow.refused]  # fmt: skip

    def follow(self, run: str) -> None:
        self.runs_followed.add(run)
        for by_run in self.counts()[:-1]:
            by_run[run] = 3
        self.program.inflow.refused[run, "forged"] = 2
        self.record(run, "running")

    def end(self, run: str) -> None:
        self.runs_followed.discard(run)
        self.record(run, "ended")

    def record(self, run: str, state: Any) -> None:
        self.tally(RunRecord(run=run, state=state, hello=make.hello(run), started_unix=0.0, updated_unix=0.0))

    def shown(self) -> dict[str, set[str]]:
        """Metric -> runs that have a series of it."""
        return {
            family.name.removeprefix("fp8watch_"): {s.labels["run"] for s in family.samples}
            for family in self.exporter.collect()
            if "run" in family.samples[0].labels
        }


@pytest.fixture
def controller() -> Controller:
    return Controller()


# case: PRM-13
# case: PRM-15
def test_the_counters_of_a_run_go_ten_minutes_after_it(controller: Controller) -> None:
    for run in ("ends", "stays"):
        controller.follow(run)
    named = {name.removesuffix("_total") for name in BY_RUN}
    shown = controller.shown()
    assert named <= shown.keys()
    assert all(shown[name] == {"ends", "stays"} for name in named)
    controller.end("ends")
    controller.shown()
    controller.clock.now += ENDED_TTL_SECONDS - 1
    assert all("ends" in runs for name, runs in controller.shown().items() if name in named)
    controller.clock.now += 2
    assert all(runs == {"stays"} for runs in controller.shown().values())
    assert all(len(by_run) == 1 for by_run in controller.counts()), "they are forgotten, not only hidden"


def test_a_run_that_comes_back_in_time_keeps_its_counters(controller: Controller) -> None:
    controller.follow("r")
    controller.end("r")
    for _ in range(3):
        controller.clock.now += ENDED_TTL_SECONDS - 1
        controller.shown()
        controller.runs_followed.add("r")
        controller.record("r", "running")
        controller.shown()
        controller.runs_followed.discard("r")
    assert controller.program.inflow.taken["r"] == 3


def test_a_controller_that_stands_by_forgets_what_it_decided_for(controller: Controller) -> None:
    controller.follow("r")
    controller.program.is_active = False
    controller.runs_followed.clear()
    controller.shown()
    controller.clock.now += ENDED_TTL_SECONDS + 1
    assert "controller_lag_entries" not in controller.shown()
    assert not controller.program.inflow.taken


def test_though_nobody_scrapes_they_are_bounded_and_what_trains_stays(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "MAX_RUNS", 10)
    controller.exporter = ControllerExporter(controller.program, controller.tally)
    controller.follow("trains")
    for number in range(100):
        controller.follow(f"short-{number}")
        controller.end(f"short-{number}")
        assert all(len(by_run) <= 11 for by_run in controller.counts())
    newest = {"trains", *(f"short-{number}" for number in range(91, 100))}
    shown = controller.shown()
    assert shown["controller_entries"] == newest
    assert shown["run_state"] == newest
    for number in range(20):
        controller.follow(f"also-{number}")
    assert len(controller.shown()["controller_entries"]) == 21, "what is decided for is never let go"


def test_findings_of_a_run_that_trains_are_not_pushed_out_by_short_ones(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "MAX_RUNS", 5)
    controller.follow("trains")
    controller.tally(
        Finding(id="f", run="trains", attempt=0, step=1, onset_step=1, detector="nonfinite", severity="act",
                cause="data")
    )  # fmt: skip
    for number in range(20):
        controller.follow(f"short-{number}")
        controller.end(f"short-{number}")
    assert controller.shown()["findings"] == {"trains"}


def test_what_has_no_counters_left_is_not_remembered() -> None:
    clock = Clock()
    departed = Departed(clock, ttl_seconds=10.0, most=100)
    counts = {"r": 1}
    departed.look(set(), [counts])
    clock.now += 11
    del counts["r"]
    departed.look(set(), [counts])
    counts["r"] = 1
    departed.look(set(), [counts])
    assert counts == {"r": 1}, "its time begins anew"


@pytest.mark.parametrize(("host", "shown"), [("::1", "[::1]"), ("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "127.0.0.1")])
def test_the_address_of_a_controllers_metrics_can_be_asked(controller: Controller, host: str, shown: str) -> None:
    try:
        controller.exporter.start(host, 0)
    except OSError as error:
        pytest.skip(f"no {host} here: {error}")
    try:
        assert controller.exporter.url.startswith(f"http://{shown}:")
        assert 'fp8watch_controller_active{holder="c0"}' in make.scrape(controller.exporter.url)
    finally:
        controller.exporter.stop()
