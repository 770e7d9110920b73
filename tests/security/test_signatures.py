"""Commands, verdicts on checkpoints, approvals, agents' entries: what is signed, and what a forger gets done."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8watch import wire
from fp8watch.controller.stores.base import Approval
from fp8watch.errors import WireError
from fp8watch.records import Command, LedgerUpdate
from fp8watch.security import KeyRing, Signer, Verifier, approvals
from fp8watch.security.envelope import Envelope, Opener, Sealer

RING = KeyRing("command", (b"k" * 40,))
APPROVALS = KeyRing("approval", (b"k" * 40,))
FRAMES = KeyRing("frame", (b"k" * 40,))
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text(max_size=8)
)
PARAMS = st.dictionaries(st.text(max_size=8), VALUES | st.lists(VALUES, max_size=3), max_size=4)


def command(**changes: Any) -> Command:
    fields: dict[str, Any] = {
        "id": "a-1", "run": "r", "attempt": 1, "term": 2, "sequence": 3, "verb": "apply", "action": "rollback",
        "params": {"checkpoint": "step-100", "skip_batches": 4}, "last_step": 250,
    }  # fmt: skip
    return Command(**(fields | changes))


@given(PARAMS)
def test_a_signed_command_is_believed_after_the_wire(params: dict[str, Any]) -> None:
    sent = Signer(RING).command(command(params=params))
    received = wire.unpack_reply(wire.pack(sent))
    assert isinstance(received, Command)
    assert Verifier(RING).command(received)


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "a-2"}, {"run": "s"}, {"attempt": 2}, {"term": 9}, {"sequence": 4}, {"verb": "revert"},
        {"action": "halt"}, {"params": {"checkpoint": "step-0", "skip_batches": 4}}, {"params": {}},
        {"last_step": 10**9}, {"signature": b""}, {"signature": b"\0" * 32},
    ],
)  # fmt: skip
def test_no_field_of_a_command_can_be_exchanged(changes: dict[str, Any]) -> None:
    sent = Signer(RING).command(command())
    verifier = Verifier(RING)
    assert verifier.command(sent)
    assert not verifier.command(msgspec.structs.replace(sent, **changes))
    assert verifier.refused == 1


def test_the_order_of_parameters_does_not_matter() -> None:
    sent = Signer(RING).command(command(params={"a": 1, "b": 2}))
    assert Verifier(RING).command(msgspec.structs.replace(sent, params={"b": 2, "a": 1}))


def test_other_keys_make_no_commands() -> None:
    forged = Signer(APPROVALS).command(command())
    assert not Verifier(RING).command(forged)


def test_an_old_verdict_on_a_checkpoint_is_not_brought_up_again() -> None:
    signer, verifier = Signer(RING), Verifier(RING)
    good = signer.ledger(LedgerUpdate(run="r", checkpoint="step-100", label="good", issued_ns=1))
    tainted = signer.ledger(LedgerUpdate(run="r", checkpoint="step-100", label="tainted", issued_ns=2))
    assert verifier.ledger(good)
    assert verifier.ledger(tainted)
    assert not verifier.ledger(good)
    assert not verifier.ledger(msgspec.structs.replace(good, issued_ns=3))
    assert verifier.ledger(tainted)


@pytest.mark.parametrize("changes", [{"action_id": "b"}, {"verdict": "approve"}, {"run": "s"}, {"by": "somebody"}])
def test_an_approval_is_about_one_action_of_one_run(changes: dict[str, Any]) -> None:
    given_one = approvals.sign(Approval(run="r", action_id="a", verdict="refuse", by="me", time_unix=1.0), APPROVALS)
    assert approvals.verify(given_one, APPROVALS)
    assert not approvals.verify(msgspec.structs.replace(given_one, **changes), APPROVALS)
    assert not approvals.verify(approvals.sign(given_one, RING), APPROVALS)


@given(st.binary(max_size=64), st.text(max_size=10))
def test_an_entry_opens_once(body: bytes, sender: str) -> None:
    sealed = Sealer(sender, 7, FRAMES).seal(body)
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(sealed), type=Envelope)
    opener = Opener(FRAMES)
    assert opener.open(received) == body
    with pytest.raises(WireError, match="before"):
        opener.open(received)


@pytest.mark.parametrize(
    "changes", [{"sender": "other"}, {"incarnation": 9}, {"sequence": 99}, {"body": b"forged"}, {"signature": b""}]
)
def test_a_changed_entry_does_not_open(changes: dict[str, Any]) -> None:
    sealed = Sealer("node", 7, FRAMES).seal(b"body")
    opener = Opener(FRAMES)
    with pytest.raises(WireError, match="not signed"):
        opener.open(msgspec.structs.replace(sealed, **changes))
    assert opener.open(sealed) == b"body"


def test_order_survives_gaps_a_restarted_agent_and_a_successor() -> None:
    first, opener = Sealer("node", 1, FRAMES), Opener(FRAMES)
    one, _lost, three = first.seal(b"1"), first.seal(b"2"), first.seal(b"3")
    assert opener.open(one) == b"1"
    assert opener.open(three) == b"3"
    restarted = Sealer("node", 2, FRAMES).seal(b"4")
    successor = Opener(FRAMES)
    successor.resume(opener.numbers())
    assert successor.open(restarted) == b"4"
    for old in (one, three):
        with pytest.raises(WireError, match="before"):
            successor.open(old)


def test_without_keys_everything_is_believed() -> None:
    assert Verifier(None).command(Signer(None).command(command()))
    assert Opener(None).open(Sealer("node", 1, None).seal(b"body")) == b"body"


def test_a_forged_approval_is_counted_once_however_often_it_is_looked_at() -> None:
    good = approvals.sign(Approval(run="r", action_id="a", verdict="approve"), APPROVALS)
    forged = [
        Approval(run="r", action_id="a", verdict="approve", time_unix=float("nan")),
        msgspec.structs.replace(good, action_id="b"),
    ]
    refused: set[bytes] = set()
    looks = [approvals.sort([good, *forged[:count]], APPROVALS, refused) for count in (1, 1, 2, 2, 0, 1)]
    assert [new for _, new in looks] == [1, 0, 1, 0, 0, 1]
    assert all(genuine == [good] for genuine, _ in looks)
