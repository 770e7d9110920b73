"""Many who scrape at once, or without a pause, cost little more than one: one page is made, and shared."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import hand_made as make
import pytest

from fp8watch.shared_reply import MAX_AGE_SECONDS, MAX_KINDS, SharedReply
from fp8watch_agent.exporter import Exporter
from fp8watch_agent.metrics_state import MetricsState


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Page:
    """A WSGI app that takes a while, and says how often it was asked."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds, self.times = clock, seconds, 0

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        self.times += 1
        self.clock.now += self.seconds
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [str(self.times).encode()]


def ask(app: SharedReply, **environ: str) -> bytes:
    def start_response(status: str, headers: list[tuple[str, str]]) -> None:
        assert (status, headers) == ("200 OK", [("Content-Type", "text/plain")])
        headers.append(("Date", "as the server does"))

    return b"".join(app({"REQUEST_METHOD": "GET", **environ}, start_response))


@pytest.mark.parametrize(("seconds", "reused_for"), [(0.001, 0.01), (0.05, 0.5), (0.08, 0.8), (3.0, MAX_AGE_SECONDS)])
def test_a_page_is_given_again_for_a_moment_that_is_short_where_it_costs_little(
    seconds: float, reused_for: float
) -> None:
    clock = Clock()
    page = Page(clock, seconds)
    app = SharedReply(page, clock)
    assert [ask(app), ask(app)] == [b"1", b"1"]
    clock.now += reused_for * 0.99
    assert ask(app) == b"1"
    clock.now += reused_for * 0.02
    assert ask(app) == b"2"


def test_who_asks_for_another_format_gets_it_and_what_is_kept_is_bounded() -> None:
    clock = Clock()
    page = Page(clock, 0.1)
    app = SharedReply(page, clock)
    assert ask(app, HTTP_ACCEPT="a") == b"1"
    assert ask(app, HTTP_ACCEPT="a", QUERY_STRING="name[]=x") == b"2"
    assert ask(app, HTTP_ACCEPT="a", HTTP_ACCEPT_ENCODING="gzip") == b"3"
    assert ask(app, HTTP_ACCEPT="a") == b"1"
    for number in range(3 * MAX_KINDS):
        ask(app, HTTP_ACCEPT=str(number))
    assert len(app._replies) == MAX_KINDS


def test_a_page_that_cannot_be_made_is_not_kept() -> None:
    clock = Clock()
    page = Page(clock, 0.0)
    fails = [True]

    def broken(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        if fails:
            raise OSError(fails.pop())
        return page(environ, start_response)

    app = SharedReply(broken, clock)
    with pytest.raises(OSError, match="True"):
        ask(app)
    assert ask(app) == b"1"


def test_many_scrapers_at_once_share_one_page_and_nobody_waits_for_them() -> None:
    state = MetricsState(clock=time.monotonic)
    state.observe(make.hello("r"))
    made: list[float] = []
    inner = state.snapshot

    def slow() -> Any:
        made.append(time.monotonic())
        time.sleep(0.2)
        return inner()

    state.snapshot = slow  # type: ignore[method-assign]
    exporter = Exporter(state)
    exporter.start("127.0.0.1", 0)
    got: list[bytes] = []

    def scrape() -> None:
        for _ in range(3):
            with urllib.request.urlopen(exporter.url, timeout=20) as response:
                got.append(response.read())

    try:
        threads = [threading.Thread(target=scrape) for _ in range(20)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    finally:
        exporter.stop()
    assert len(got) == 60
    assert all(b"fp8watch_run_state" in page for page in got)
    assert len(made) <= 1 + (time.monotonic() - began) / MAX_AGE_SECONDS
