"""Where an agent's message enters the controller: what is foreign, forged, repeated or garbage stays out."""

from __future__ import annotations

import time
from typing import Any

import hand_made as make
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8watch import wire
from fp8watch.controller.cluster.inflow import Inflow
from fp8watch.controller.cluster.redis_link import RedisLink
from fp8watch.records import Hello, RankLost
from fp8watch.security.envelope import Envelope, Opener, Sealer, unpack
from fp8watch.security.keyring import KeyRing

RING = KeyRing("frame", (b"k" * 32,))
OTHER = KeyRing("frame", (b"x" * 32,))


def inflow(ring: KeyRing | None = None) -> Inflow:
    made = Inflow(RedisLink(client=None, is_cluster=False, shown=""), "c", ring)
    made._last_ids["r"] = "0-0"
    made._openers["r"] = Opener(ring)
    return made


def entry(sealer: Sealer, message: Any) -> dict[bytes, bytes]:
    return {b"k": b"m", b"e": msgspec.msgpack.encode(sealer.seal(wire.pack(message)))}


def test_a_message_enters_once_with_its_sender() -> None:
    made = inflow()
    fields = entry(Sealer("n7", 1, None), make.hello("r"))
    entered = made.enter("r", b"5-0", fields)
    assert isinstance(entered.message, Hello)
    assert (entered.node, entered.entry_id, made.last_id("r")) == ("n7", "5-0", "5-0")
    assert made.enter("r", b"6-0", fields).message is None
    assert made.refused["r", "repeated"] == 1
    assert made.last_id("r") == "6-0", "not read again"


def test_an_agent_that_was_restarted_is_heard_and_its_predecessor_no_more() -> None:
    made = inflow()
    old, new = Sealer("n", 1, None), Sealer("n", 2, None)
    first, second = entry(old, make.goodbye("r", 1)), entry(old, make.goodbye("r", 2))
    assert made.enter("r", b"1-0", first).message is not None
    assert made.enter("r", b"2-0", entry(new, make.goodbye("r", 3))).message is not None
    assert made.enter("r", b"3-0", second).message is None
    successor = inflow()
    successor._openers["r"].resume(made.numbers("r"))
    assert successor.enter("r", b"4-0", first).message is None


def test_two_living_agents_of_one_node_are_told_from_a_repetition(caplog: pytest.LogCaptureFixture) -> None:
    """The older of them goes on: what it says cannot be taken for the node's, and nobody may miss that."""
    made = inflow(RING)
    old, new = Sealer("n", 1, RING), Sealer("n", 2, RING)
    repeated = entry(old, make.hello("r"))
    assert made.enter("r", b"1-0", repeated).message is not None
    assert made.enter("r", b"2-0", entry(new, make.hello("r", rank=1, world_size=2))).message is not None
    for number in range(3, 6):
        assert made.enter("r", b"%d-0" % number, repeated).message is None
    assert made.refused == {("r", "repeated"): 3}
    assert "two agents" not in caplog.text
    for number in range(6, 12):
        assert made.enter("r", b"%d-0" % number, entry(old, make.goodbye("r", number))).message is None
    assert made.refused == {("r", "repeated"): 3, ("r", "second_agent"): 6}
    warnings = [item.message for item in caplog.records if item.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "two agents send as node n" in warnings[0]
    assert "FP8WATCH_NODE" in warnings[0]
    successor = inflow(RING)  # knows only the newest
    successor._openers["r"].resume(made.numbers("r"))
    for number in range(12, 16):
        assert successor.enter("r", b"%d-0" % number, entry(old, make.goodbye("r", number))).message is None
    assert successor.refused == {("r", "repeated"): 1, ("r", "second_agent"): 3}


def test_what_is_not_an_agents_own_is_refused_by_reason() -> None:
    made = inflow(RING)
    assert made.enter("r", b"1-0", entry(Sealer("n", 1, RING), make.goodbye("r"))).message is not None
    assert made.enter("r", b"2-0", entry(Sealer("n", 2, OTHER), make.goodbye("r"))).message is None
    assert made.enter("r", b"3-0", entry(Sealer("n", 2, None), make.goodbye("r"))).message is None
    assert made.refused["r", "forged"] == 2
    assert made.enter("r", b"4-0", entry(Sealer("n", 3, RING), make.goodbye("another"))).message is None
    assert made.refused["r", "foreign"] == 1


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", msgspec.msgpack.encode({"type": "from a newer version", "run": "r"}),
     msgspec.msgpack.encode({"type": "node", "run": "r"}), msgspec.msgpack.encode([1, 2])],
)  # fmt: skip
def test_a_body_of_another_version_is_counted_and_the_next_is_fine(body: bytes) -> None:
    made = inflow()
    sealer = Sealer("n", 1, None)
    fields = {b"e": msgspec.msgpack.encode(sealer.seal(body))}
    assert made.enter("r", b"1-0", fields).message is None
    assert made.refused["r", "malformed"] == 1
    assert made.enter("r", b"2-0", entry(sealer, RankLost(run="r", rank=1, node="n"))).message is not None


def test_fields_that_a_newer_agent_adds_are_passed_over() -> None:
    """A rolling upgrade: the agent is one version ahead."""
    newer = msgspec.to_builtins(make.goodbye("r", 9), builtin_types=(bytes,)) | {"invented_later": [1, {"a": b"x"}]}
    envelope = Sealer("n", 1, None).seal(msgspec.msgpack.encode(newer))
    entered = inflow().enter("r", b"1-0", {b"e": msgspec.msgpack.encode(envelope), b"also": b"new"})
    assert entered.message == make.goodbye("r", 9)


@pytest.mark.parametrize("version", [0, wire.WIRE_VERSION + 1])
def test_an_agent_of_a_version_that_is_not_read_is_named_and_the_next_is_heard(
    version: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = inflow(RING)
    with monkeypatch.context() as other:
        other.setattr(wire, "WIRE_VERSION", version)
        fields = entry(Sealer("n3", 1, RING), make.hello("r"))
    assert made.enter("r", b"1-0", fields).message is None
    assert made.peek("r", fields[b"e"]) is None
    assert made.refused == {("r", "version"): 1}
    assert f"node 'n3' speaks wire version {version}" in caplog.text
    # Under the signature: who relays it cannot make it another version's.
    said = msgspec.structs.replace(unpack(fields[b"e"]), wire_version=wire.WIRE_VERSION)
    assert made.enter("r", b"2-0", {b"e": msgspec.msgpack.encode(said)}).message is None
    assert made.refused["r", "forged"] == 1
    assert made.enter("r", b"3-0", entry(Sealer("n3", 2, RING), make.hello("r"))).message is not None


class Silent:
    """A client without news that answers at once, as Redis Cluster's does, which cannot block over several slots."""

    calls = 0

    def xreadgroup(self, *_: Any, **__: Any) -> list[Any]:
        self.calls += 1
        return []


# case: RED-04
@pytest.mark.parametrize(("runs", "is_cluster"), [((), False), (("r", "s"), True)])
def test_nothing_to_wait_for_is_no_reason_to_spin(runs: tuple[str, ...], is_cluster: bool) -> None:
    client = Silent()
    made = Inflow(RedisLink(client=client, is_cluster=is_cluster, shown=""), "c", None)
    made._last_ids = dict.fromkeys(runs, "0-0")
    began, cpu = time.monotonic(), time.thread_time()
    looks = 0
    while time.monotonic() - began < 0.5:
        assert made.read(block_ms=50) == []
        looks += 1
    assert looks <= 12
    assert client.calls == looks * len(runs)
    assert time.thread_time() - cpu < 0.1


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.sampled_from([b"e", b"k", b"x"]), st.binary(max_size=200), max_size=3),
    st.binary(max_size=200), st.integers(0, 2**63), st.booleans(),
)  # fmt: skip
def test_no_entry_raises(fields: dict[bytes, bytes], body: bytes, number: int, is_envelope: bool) -> None:
    made = inflow()
    if is_envelope:
        envelope = Envelope(sender="n", incarnation=1, sequence=number, body=body)
        fields = {b"e": msgspec.msgpack.encode(envelope)}
    entered = made.enter("r", b"1-0", fields)
    assert entered.message is None or entered.message.run == "r"
