"""One run's session: what fails in store or controller is counted and said once, and the run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import hand_made as make
import pytest

from fp8watch.controller.service import RunController
from fp8watch.controller.stores.base import Store
from fp8watch.controller.stores.memory import MemoryStore
from fp8watch.records import Message, Reply, Stored, Welcome
from fp8watch_agent import store_place
from fp8watch_agent.metrics_state import MetricsState
from fp8watch_agent.options import AgentOptions
from fp8watch_agent.session import Controller, RunSession


class _FullDisk(MemoryStore):
    is_full = False

    def append(self, run: str, records: Iterable[Stored]) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")
        super().append(run, records)


def _real(store: Store, listener: Callable[[Stored], None]) -> Controller:
    return RunController(store, clock=time.time, listener=listener)


class _Failing:
    def __init__(self, store: Store, listener: Callable[[Stored], None]) -> None:
        pass

    def receive(self, message: Message) -> list[Reply]:
        raise RuntimeError("a bug")

    def lost(self, run: str, rank: int) -> list[Reply]:
        raise RuntimeError("a bug")

    def tick(self) -> list[Reply]:
        raise RuntimeError("a bug")


def _counter(metrics: MetricsState, name: str, *labels: str) -> float:
    family = next(f for f in metrics.snapshot() if f.metric.name == name)
    return dict(family.samples)[("r", *labels)]


@pytest.fixture
def options(tmp_path: Path) -> AgentOptions:
    return AgentOptions(socket=tmp_path / "s", directory=tmp_path, run="r")


@pytest.fixture
def metrics() -> MetricsState:
    return MetricsState(clock=time.monotonic)


def test_a_disk_that_fills_up_is_one_warning_and_a_count(
    options: AgentOptions, metrics: MetricsState, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = _FullDisk()
    opened = store_place.OpenedStore(store=store, path="/x/store.sqlite", endpoint_directory=tmp_path, warnings=[])
    monkeypatch.setattr(store_place, "open_store", lambda options, run: opened)
    session = RunSession("r", options=options, metrics=metrics, metrics_url="http://m", make=_real)
    (welcome, *_) = session.receive(make.hello("r"))
    assert isinstance(welcome, Welcome)
    assert (welcome.metrics_url, welcome.store, welcome.warnings) == ("http://m", "/x/store.sqlite", [])
    assert session.news() is None
    store.is_full = True
    for step in (1, 2, 3):
        session.receive(make.frame("r", step))
    news = session.news()
    assert news is not None
    assert len(news.warnings) == 1
    assert "No space left on device" in news.warnings[0]
    assert session.news() is None
    assert _counter(metrics, "fp8watch_store_errors_total") == 3
    assert _counter(metrics, "fp8watch_step") == 3
    session.close()


def test_a_controller_that_fails_does_not_end_the_run(options: AgentOptions, metrics: MetricsState) -> None:
    session = RunSession("r", options=options, metrics=metrics, metrics_url="", make=_Failing)
    (welcome,) = session.receive(make.hello("r"))
    assert isinstance(welcome, Welcome)
    assert session.receive(make.frame("r", 1)) == []
    assert session.tick() == []
    assert session.lost(0) == []
    assert _counter(metrics, "fp8watch_step") == 1
    assert _counter(metrics, "fp8watch_frames_dropped_total", "controller_error") == 4
    session.close()
