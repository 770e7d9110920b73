"""Any number of runs on one agent: all series together stay within the budget, and what is left out is counted."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import hand_made as make
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from fp8watch.metrics import BY_NAME
from fp8watch.records import NodeFrame
from fp8watch_agent import families, metrics_state, server
from fp8watch_agent.exporter import StateCollector
from fp8watch_agent.families import Family
from fp8watch_agent.lifecycle import Lifecycle
from fp8watch_agent.metrics_state import MetricsState

Series = dict[tuple[str, ...], float]
EVERYTHING = 10_000_000
DROPPED = "agent_series_dropped_total"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Node:
    def __init__(self, budget: int = EVERYTHING, **options: Any) -> None:
        self.clock = Clock()
        self.state = MetricsState(clock=self.clock, series_budget=budget, **options)
        self.registry = CollectorRegistry()
        self.registry.register(StateCollector(self.state))

    def train(self, run: str, *, blocks: int = 4, is_over: bool = False) -> None:
        self.state.observe(make.hello(run))
        self.state.observe(make.layout(run, blocks=blocks, modules=("a", "b", "c")))
        self.state.observe(make.frame(run, 1, blocks * 9, amax=1.0, scale=448.0, quantized=1, saturated=1))
        if is_over:
            self.clock.now += 0.001
            self.state.run_over(run, "ended")

    def num_shown(self) -> int:
        """Lines of the page that are series."""
        return sum(not line.startswith(b"#") for line in generate_latest(self.registry).splitlines())

    def shown(self) -> dict[str, Series]:
        """Metric without prefix -> its series."""
        return {family.metric.name[9:]: dict(family.samples) for family in self.state.snapshot()}

    def num_dropped(self) -> float:
        return sum(self.shown()[DROPPED].values())

    def runs(self) -> set[str]:
        return {labels[0] for labels in self.shown()["run_state"]}


# case: PRM-13
@pytest.mark.parametrize("budget", [100, 1000, 5000])
@pytest.mark.parametrize(("live", "ended"), [(1, 0), (0, 40), (40, 0), (15, 25)])
def test_the_budget_holds_for_all_series_and_what_is_left_out_is_counted(budget: int, live: int, ended: int) -> None:
    nodes = [Node(budget), Node(EVERYTHING)]
    for node in nodes:
        for number in range(live + ended):
            node.train(f"run-{number}", is_over=number >= live)
    shown, whole = (node.num_shown() for node in nodes)
    assert shown <= budget
    tight, free = (node.shown() for node in nodes)
    assert whole - len(free[DROPPED]) == shown - len(tight[DROPPED]) + sum(tight[DROPPED].values())
    assert sum(free[DROPPED].values()) == 0


def test_what_the_process_says_of_itself_is_within_the_budget_too() -> None:
    about = Family(metric=BY_NAME["fp8watch_agent_redis_up"], samples=[((f"n{number}",), 1.0) for number in range(80)])
    node = Node(200, about_process=lambda: [about])
    for number in range(50):
        node.train(f"run-{number}")
    assert node.num_shown() <= 200
    assert len(node.shown()["agent_redis_up"]) == 80


def test_what_is_left_out_is_counted_once_and_no_counter_falls_while_runs_come_and_go() -> None:
    node = Node(150, ended_ttl_seconds=30.0)
    before: Series = {}
    for number in range(40):
        node.train(f"run-{number}", is_over=number % 3 == 0)
        now = node.shown()[DROPPED]
        for labels in before.keys() & now.keys():
            assert now[labels] >= before[labels], labels
        assert node.shown()[DROPPED] == now, "left out again is not left out anew"
        before, node.clock.now = now, node.clock.now + 5.0
    assert before["",] > 0


def test_live_runs_come_before_ended_ones() -> None:
    node = Node(2000)
    for number in range(100):
        node.train(f"over-{number}", is_over=True)
    for number in range(2):
        node.train(f"live-{number}")
    shown = node.shown()
    assert shown["loss"].keys() >= {("live-0",), ("live-1",)}
    assert {labels[0] for labels in shown["tensor_amax"]} == {"live-0", "live-1"}
    assert shown[DROPPED]["live-0",] == 0


# case: DSH-07
def test_neither_a_large_model_nor_many_ended_runs_hide_how_the_last_ones_ended() -> None:
    node = Node(1000)
    for number in range(200):
        node.train(f"over-{number}", is_over=True)
    node.train("large", blocks=200)
    node.train("last", is_over=True)
    shown = node.shown()
    assert shown["run_state"]["last", "ended"] == 1
    assert ("over-0", "ended") not in shown["run_state"], "the newest ends come first"
    assert shown["loss"]["large",] == 2.0
    assert shown[DROPPED]["large",] > 0
    of_large = sum(labels[0] == "large" for series in shown.values() for labels in series)
    assert of_large > 700, "ended runs have a share, not all"


def test_a_page_takes_time_in_proportion_to_the_runs() -> None:
    def calls(num_runs: int, *, is_over: bool) -> int:
        node, count = Node(5000), 0
        for number in range(num_runs):
            node.train(f"run-{number}", is_over=is_over)
        node.state.snapshot()

        def profile(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(profile)
        node.state.snapshot()
        sys.setprofile(None)
        return count

    for is_over in (False, True):
        few, many = calls(50, is_over=is_over), calls(200, is_over=is_over)
        assert many < 5 * few, (few, many)


def test_no_message_waits_while_a_page_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    node.train("r")
    waited: list[bool] = []
    inner = families.of_run

    def of_run(*given: Any) -> Any:
        thread = threading.Thread(
            target=node.state.observe, args=(make.frame("r", 2 + len(waited), scalars={"loss": 9.0}),)
        )
        thread.start()
        thread.join(5.0)
        waited.append(thread.is_alive())
        return inner(*given)

    monkeypatch.setattr(families, "of_run", of_run)
    loss = node.shown()["loss"]
    assert waited == [False]
    assert loss["r",] == 2.0, "a page shows one moment of a run"
    assert node.shown()["loss"]["r",] == 9.0


# case: PRM-15
def test_ended_runs_go_by_time_though_nobody_scrapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TICK_SECONDS", 0.05)
    monkeypatch.setattr(server, "LIFECYCLE_SECONDS", 0.05)
    node = Node(ended_ttl_seconds=600.0)
    node.train("over", is_over=True)
    node.train("live")

    def open_session(name: str) -> Any:
        raise AssertionError(name)

    async def serve(listener: socket.socket) -> tuple[set[str], set[str]]:
        agent = server.AgentServer(
            lifecycle=Lifecycle(is_embedded=False, started=0.0, connect_seconds=1.0, end_grace_seconds=1.0),
            metrics=node.state, open_session=open_session,
        )  # fmt: skip
        task = asyncio.create_task(agent.serve(listener))
        await asyncio.sleep(0.3)
        before = set(node.state._runs)
        node.clock.now += 601.0
        await asyncio.sleep(0.3)
        agent.stop()
        await task
        return before, set(node.state._runs)

    listener = server.listen(tmp_path / "s")
    assert asyncio.run(serve(listener)) == ({"over", "live"}, {"live"})


def test_the_number_of_runs_is_bounded_and_ended_ones_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_state, "MAX_RUNS", 5)
    node = Node()
    for number in range(3):
        node.train(f"over-{number}", is_over=True)
        node.state.drop(f"never-{number}", "version")  # nobody trains under that name
    assert node.runs() == {"over-0", "over-1", "over-2", "never-1", "never-2"}
    for number in range(4):
        node.train(f"live-{number}")
    assert node.runs() == {"over-2", "live-0", "live-1", "live-2", "live-3"}
    for number in range(4, 7):
        node.train(f"live-{number}")
    assert node.runs() == {f"live-{number}" for number in range(5)}
    assert node.shown()[DROPPED]["",] == 2, "each run that is not on the page, once"
    node.state.run_over("live-0", "ended")
    node.train("live-6")
    assert "live-6" in node.runs()


def test_the_number_of_tensors_is_bounded_for_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_state, "MAX_TENSORS_TOGETHER", 100)
    node = Node()
    for number in range(4):
        node.train(f"over-{number}", is_over=True)  # 36 tensors each
    shown = node.shown()
    assert {labels[0] for labels in shown["tensor_amax"]} == {"over-2", "over-3"}
    assert shown["run_state"]["over-0", "ended"] == 1
    for number in range(2):
        node.train(f"live-{number}")
    node.train("large")  # is not refused: its scalars count, and a node's agent sends on what it has exported
    node.state.observe_node(make.layout("large", blocks=4, modules=("a", "b", "c")))
    node.state.observe_node(
        NodeFrame(run="large", attempt=0, node="n", rank=0, step=1, layout_id=1, time_unix=1.0, ranks=[0], scalars=[{}],
                  columns=make.frame("large", 1, 36, amax=1.0).columns)
    )  # fmt: skip
    shown = node.shown()
    assert shown[DROPPED]["",] == 72
    assert not any(labels[0] == "large" for labels in shown["tensor_clipped_steps_total"])
    assert {labels[0] for labels in shown["tensor_amax"]} == {"live-0", "live-1"}
    assert shown["loss"]["large",] == 2.0
    node.state.observe(make.layout("live-0", blocks=4, modules=("a", "b", "c"), layout_id=2))  # said again: nothing new
