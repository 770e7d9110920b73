"""What a node's agent hands to its ranks: what is for their start of the run, and nothing of an earlier one."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hand_made as make
import pytest

from fp8watch import wire
from fp8watch.records import Command, LedgerUpdate, Uplink
from fp8watch.security import KeyRing, Signer, Verifier
from fp8watch_agent.downlink import DownlinkThread
from fp8watch_agent.metrics_state import MetricsState
from fp8watch_agent.node_session import NodeSession


@pytest.fixture
def session(tmp_path: Path) -> NodeSession:
    sent: list[Uplink] = []
    return NodeSession(
        "r", node="n0", send=sent.append, metrics=MetricsState(clock=time.monotonic), metrics_url="",
        socket_path=tmp_path / "s", directory=tmp_path, redis="redis",
    )  # fmt: skip


def order(sequence: int, start: str, **more: Any) -> Command:
    return Command(
        id=f"a{sequence}", run="r", term=1, sequence=sequence, verb="apply", action="halt", last_step=99, start=start,
        **({"attempt": 0} | more),
    )  # fmt: skip


def label(start: str, label: Any = "good") -> LedgerUpdate:
    return LedgerUpdate(run="r", checkpoint="c", label=label, start=start)


def greet(session: NodeSession, start: str, **more: Any) -> None:
    session.receive(make.hello("r", start=start, **more))


def test_what_is_for_an_earlier_start_is_neither_passed_on_nor_kept(session: NodeSession) -> None:
    """The stream of a run's name has all of it for days, and is read from its first entry."""
    greet(session, "second")
    for old in (order(1, "first"), label("first")):
        assert session.take(old) == []
    for new in (order(2, "second"), label("second")):
        assert session.take(new) == [new]
    assert session.backlog() == [label("second"), order(2, "second")]


def test_ranks_of_one_start_hear_what_came_before_they_did(session: NodeSession) -> None:
    """Also through an agent that was started again: it meets the same start."""
    greet(session, "first", world_size=2)
    assert session.take(order(1, "first")) == [order(1, "first")]
    greet(session, "first", world_size=2, rank=1)
    greet(session, "first", world_size=2, attempt=0, step=7)
    assert session.backlog() == [order(1, "first")]


def test_a_new_start_ends_the_one_before_and_counts_its_attempts_anew(session: NodeSession) -> None:
    greet(session, "first", attempt=3)
    assert session.take(order(1, "first", attempt=3))
    assert session.take(label("first"))
    greet(session, "second", attempt=0)
    assert session.backlog() == []
    assert session.take(order(2, "first", attempt=3)) == []
    assert session.take(order(3, "second", attempt=0)) == [order(3, "second", attempt=0)]


def test_ranks_of_an_earlier_version_hear_what_names_no_start(session: NodeSession) -> None:
    greet(session, "")
    assert session.take(order(1, "")) == [order(1, "")]
    assert session.take(order(2, "first")) == []
    # And what a controller of an earlier version has ordered is for the ranks to refuse, which answer it.
    greet(session, "second")
    assert session.take(order(3, "")) == [order(3, "")]


def test_what_a_stream_has_that_nobody_signed_stops_nothing_and_what_is_old_is_no_forgery() -> None:
    """Read anew when its run is back on the node; an entry that cannot even be checked is one among others."""
    ring = KeyRing("command", (b"k" * 40,))
    signer = Signer(ring)
    first, second = (
        signer.ledger(LedgerUpdate(run="r", checkpoint="c", label=label, issued_ns=number))
        for number, label in enumerate(("good", "tainted"), 1)
    )
    delivered: list[Command | LedgerUpdate] = []
    errors: list[str] = []
    link: Any = SimpleNamespace(client=None, shown="redis")
    thread = DownlinkThread(
        link, delivered.append, errors.append, Verifier(ring), node="n0", on_contest=lambda run, why: None
    )

    def read(*replies: Command | LedgerUpdate) -> None:
        for reply in replies:
            thread._take("r", {b"b": wire.pack(reply)})

    read(first, second, first, second)
    assert delivered == [first, second, second]
    assert errors == []
    read(order(1, "s"), order(2, "s", params={"a": {1: 2}}), label("s"))
    assert errors == ["forged"] * 3
    read(signer.command(order(3, "s")))
    assert delivered[3:] == [signer.command(order(3, "s"))]
