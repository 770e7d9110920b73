"""The HTTP endpoint: ports, registries, scrapes while frames come in."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Iterator

import hand_made as make
import prometheus_client
import pytest

from fp8watch.shared_reply import MAX_AGE_SECONDS
from fp8watch_agent.exporter import Exporter
from fp8watch_agent.metrics_state import MetricsState


@pytest.fixture
def state() -> MetricsState:
    state = MetricsState(clock=time.monotonic)
    state.observe(make.hello("r"))
    state.observe(make.layout("r"))
    return state


@pytest.fixture
def exporter(state: MetricsState) -> Iterator[Exporter]:
    exporter = Exporter(state)
    exporter.start("127.0.0.1", 0)
    yield exporter
    exporter.stop()


def test_a_taken_port_is_evaded(state: MetricsState, exporter: Exporter) -> None:  # case: PRM-17
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        port = foreign.getsockname()[1]
        other = Exporter(state)
        other.start("127.0.0.1", port)
        try:
            assert other.target not in (exporter.target, f"127.0.0.1:{port}")
            assert make.scrape(other.url) == make.scrape(exporter.url)
        finally:
            other.stop()
    assert "fp8watch" not in prometheus_client.generate_latest().decode()  # nothing in the global registry


def test_the_port_is_free_after_stop(state: MetricsState) -> None:
    exporter = Exporter(state)
    exporter.start("127.0.0.1", 0)
    exporter.stop()
    with socket.create_server(("127.0.0.1", int(exporter.target.rpartition(":")[2]))):
        pass


def test_scrapes_collections_and_frames_at_once(state: MetricsState, exporter: Exporter) -> None:  # case: PRM-06
    done = threading.Event()
    seen: list[list[float]] = [[], []]
    problems: list[BaseException] = []

    def scrape(values: list[float]) -> None:
        try:
            while not done.is_set():
                values.append(make.scrape(exporter.url)['fp8watch_steps_total{run="r"}'])
                gc.collect()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=scrape, args=(values,)) for values in seen]
    for thread in threads:
        thread.start()
    step, until = 0, time.monotonic() + 1.5
    while time.monotonic() < until or not (problems or all(values and values[-1] > 0 for values in seen)):
        step += 1
        state.observe(make.frame("r", step, 6, amax=1.0, scale=1.0))
    done.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert not problems
    for values in seen:
        assert values == sorted(values)
        assert values[-1] > 0
    time.sleep(MAX_AGE_SECONDS)
    assert make.scrape(exporter.url)['fp8watch_steps_total{run="r"}'] == step
