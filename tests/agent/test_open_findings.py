"""What is wrong with a run now, and how it ended: from the detectors to /metrics, on a node and centrally."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from typing import Any

import hand_made as make
import pytest

from fp8watch.commands.controller import controller as controller_command
from fp8watch.controller.cluster.metrics import ENDED_TTL_SECONDS, ControllerExporter, Tally
from fp8watch.controller.cluster.program import ClusterProgram
from fp8watch.controller.cluster.runs import ClusterController
from fp8watch.controller.open_findings import Open, OpenFindings
from fp8watch.controller.service import RunController
from fp8watch.controller.stores.memory import MemoryStore
from fp8watch.controller.unseen import Predecessor
from fp8watch.records import Finding, Goodbye, RunRecord
from fp8watch_agent.metrics_state import MetricsState

NONFINITE = ("nonfinite", "data", "act")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Node:
    """An agent's metrics and controller, without its sockets."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.state = MetricsState(clock=self.clock)
        self.told: list[Open] = []
        self.controller = RunController(
            MemoryStore(), clock=self.clock, listener=self.state.record, on_open=self._open
        )  # fmt: skip
        self.step = 0

    def _open(self, run: str, found: Open) -> None:
        self.told.append(found)
        self.state.open_findings(run, found)

    def send(self, message: Any) -> None:
        self.state.observe(message)
        self.controller.receive(message)

    def train(self, steps: int, loss: float = 2.0) -> None:
        for _ in range(steps):
            self.step += 1
            self.send(make.frame("r", self.step, scalars={"loss": loss + 0.01 * math.sin(self.step), "grad_norm": 0.5}))

    def series(self, name: str) -> dict[tuple[str, ...], float]:
        (family,) = [family for family in self.state.snapshot() if family.metric.name == f"fp8watch_{name}"]
        return dict(family.samples)

    def is_in(self, state: str) -> bool:
        return self.series("run_state")["r", state] == 1

    def open_detectors(self) -> set[str]:
        return {labels[1] for labels, value in self.series("open_findings").items() if value}


@pytest.fixture
def node() -> Node:
    node = Node()
    node.send(make.hello("r"))
    node.train(5)
    return node


def test_a_finding_is_open_until_its_detector_is_silent_again(node: Node) -> None:
    nothing = {("r", "", "", "warn"): 0.0, ("r", "", "", "act"): 0.0}
    assert node.series("open_findings") == nothing
    node.train(1, math.nan)
    assert node.open_detectors() == {"nonfinite"}
    node.train(30)
    assert node.series("open_findings") == nothing
    assert len(node.told) == 3, "told at first and at every change, not at every step"


# case: DSH-07
def test_the_last_word_on_a_lost_run_stands_as_long_as_its_series(node: Node) -> None:
    node.train(1, math.nan)
    node.controller.lost("r", 0)
    node.state.run_over("r", "lost")
    node.clock.now += 599.0
    assert node.is_in("lost")
    assert node.open_detectors() == {"nonfinite"}
    node.clock.now += 2.0
    assert node.series("open_findings") == {}


def test_where_nobody_judges_nothing_is_said_to_be_sound() -> None:
    state = MetricsState(clock=Clock())  # an agent of a cluster, whose controller is elsewhere
    state.observe(make.hello("r"))
    (family,) = [family for family in state.snapshot() if family.metric.name == "fp8watch_open_findings"]
    assert family.samples == []


@pytest.mark.parametrize(
    ("reason", "has_failed", "state"),
    [
        ("end", False, "ended"), ("detached", False, "ended"), ("error: KeyboardInterrupt", False, "ended"),
        ("error: SystemExit", False, "ended"), ("error: RuntimeError", True, "ended"), ("ranks apart", True, "ended"),
        ("halted", False, "halted"),
    ],
)  # fmt: skip
def test_how_a_run_ended_is_told_from_its_goodbye(reason: str, has_failed: bool, state: str) -> None:
    node = Node()
    node.state.observe(make.hello("r", attempt=3))
    node.state.observe(Goodbye(run="r", rank=0, step=5, reason=reason))
    node.state.run_over("r", "ended")  # as the agent of a cluster sees it, with no word from a controller
    assert node.is_in(state)
    assert node.series("run_failed") == {("r",): float(has_failed)}
    node.state.observe(make.hello("r", attempt=4))
    assert node.series("run_failed") == {("r",): 0.0}
    node.state.run_over("r", "ended")
    assert node.is_in("ended")


def test_ranks_that_are_expected_are_those_of_the_world() -> None:
    node = Node()
    for rank in range(2):
        node.state.observe(make.hello("r", rank=rank, world_size=8))
    assert node.series("expected_ranks") == {("r",): 8.0}
    assert len(node.series("rank_info")) == 2


def test_what_a_run_forgets_is_told_again() -> None:
    told: list[tuple[str, Open]] = []
    open_findings = OpenFindings(lambda run, found: told.append((run, found)))
    for _ in range(2):
        open_findings.look("r", [])
    open_findings.forget("r")
    open_findings.look("r", [])
    assert told == [("r", frozenset())] * 2


class _Program:
    """What the exporter reads of `ClusterProgram`."""

    def __init__(self) -> None:
        self.is_active = True

    def __getattr__(self, name: str) -> Any:
        return _Nothing()


class _Nothing(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return _Nothing()

    def __call__(self) -> set[str]:
        return set()

    def __float__(self) -> float:
        return 0.0


@pytest.fixture
def central() -> tuple[Clock, Tally, _Program, Callable[[str], dict[str, float]]]:
    clock, program = Clock(), _Program()
    tally = Tally(clock)
    exporter = ControllerExporter(program, tally)  # type: ignore[arg-type]

    def shown(name: str) -> dict[str, float]:
        return {
            sample.labels.get("state") or sample.labels["detector"]: sample.value
            for family in exporter.collect()
            for sample in family.samples
            if sample.name == name and sample.value
        }

    return clock, tally, program, shown


def _record(state: str) -> RunRecord:
    return RunRecord(run="r", state=state, hello=make.hello("r"), started_unix=0.0, updated_unix=0.0)  # type: ignore[arg-type]


# case: DSH-07
def test_the_controller_says_how_it_stands_while_it_is_active_and_for_a_while_after_the_end(central) -> None:
    clock, tally, program, shown = central
    tally(_record("running"))
    tally(Finding(id="f", run="r", attempt=0, step=1, onset_step=1, detector="nonfinite", severity="act", cause="data"))
    tally.open_findings("r", frozenset({NONFINITE}))
    assert (shown("fp8watch_run_state"), shown("fp8watch_open_findings")) == ({"running": 1}, {"nonfinite": 1})
    tally(_record("lost"))
    clock.now += ENDED_TTL_SECONDS - 1
    tally(_record("lost"))
    assert (shown("fp8watch_run_state"), shown("fp8watch_open_findings")) == ({"lost": 1}, {"nonfinite": 1})
    program.is_active = False  # another decides now, and this one's knowledge is old
    assert (shown("fp8watch_run_state"), shown("fp8watch_open_findings")) == ({}, {})
    assert shown("fp8watch_findings_total") == {"nonfinite": 1}
    program.is_active = True
    clock.now += 2
    assert (shown("fp8watch_run_state"), shown("fp8watch_findings_total")) == ({}, {})


def test_the_clusters_program_tells_its_tally(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ClusterProgram] = []
    monkeypatch.setattr(ClusterProgram, "run", lambda self: made.append(self))
    monkeypatch.setattr(ClusterController, "_remembered", lambda self, run: (None, (), Predecessor()))
    monkeypatch.setattr(ClusterController, "_earlier", lambda self, run: [])  # there is no server to ask
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    tallies: list[Tally] = []
    monkeypatch.setattr(ControllerExporter, "start", lambda self, host, port: tallies.append(self._tally))
    controller_command(redis="unix:///nowhere.sock", metrics_port=0)
    made[0].runs.receive(make.hello("r"))
    tallies[0](_record("running"))
    assert tallies[0].samples()["open_findings"] == [(("r", "", "", "warn"), 0.0), (("r", "", "", "act"), 0.0)]
