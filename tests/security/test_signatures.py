"""Commands, verdicts on checkpoints, approvals, agents' entries: what is signed, and what a forger gets done."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8watch import wire
from fp8watch.controller.stores.base import Approval, unpack_approval
from fp8watch.errors import WireError
from fp8watch.records import ActionRecord, Command, LedgerUpdate
from fp8watch.security import KeyRing, Signer, Verifier, approvals
from fp8watch.security.canonical import canonical
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
        "params": {"checkpoint": "step-100", "skip_batches": 4}, "last_step": 250, "start": "s",
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
        {"id": "a-2"}, {"run": "s"}, {"start": "t"}, {"start": ""}, {"attempt": 2}, {"term": 9}, {"sequence": 4},
        {"verb": "revert"},
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


def test_what_names_no_start_is_signed_as_before_there_were_any() -> None:
    """By a version before, for one of now and the other way round."""
    plain = {
        "type": "command", "id": "a", "run": "r", "attempt": 0, "term": 1, "sequence": 1, "verb": "apply",
        "action": "halt", "params": {}, "last_step": 9, "because": {}, "signature": b"",
    }  # fmt: skip
    before = b"fp8watch 1 " + msgspec.msgpack.Encoder(order="sorted").encode(plain)
    received = wire.unpack_reply(msgspec.msgpack.encode({**plain, "signature": RING.sign(before)}))
    assert isinstance(received, Command)
    assert received.start == ""
    assert Verifier(RING).command(received)
    assert Signer(RING).command(received).signature == RING.sign(before)
    update = LedgerUpdate(run="r", checkpoint="c", label="good")
    assert b"start" not in canonical(update)


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

    def is_taken(update: LedgerUpdate) -> bool:
        return verifier.ledger(update) and verifier.is_news(update)

    assert is_taken(good)
    assert is_taken(tainted)
    assert not is_taken(good)
    assert verifier.refused == 0, "it is genuine: an agent that reads a stream anew has it again"
    assert not is_taken(msgspec.structs.replace(good, issued_ns=3))
    assert verifier.refused == 1
    assert is_taken(tainted)


def action(**changes: Any) -> ActionRecord:
    """One that waits for a person."""
    fields: dict[str, Any] = {
        "id": "r-1.0001", "run": "r", "attempt": 1, "action": "rollback", "params": {"layers": ("a", "b"), "skip": 4},
        "rule": "x", "finding": "f", "mode": "approve", "status": "waiting", "decided_step": 200, "expires_step": 1200,
        "start": "s",
    }  # fmt: skip
    return ActionRecord(**(fields | changes))


def verdict(about: ActionRecord, ring: KeyRing | None = APPROVALS) -> Approval:
    return approvals.give(about, "refuse", by="me", time_unix=1.0, ring=ring)


@pytest.mark.parametrize(
    "changes",
    [
        {"action_id": "b"}, {"verdict": "approve"}, {"run": "s"}, {"by": "somebody"}, {"time_unix": 2.0}, {"start": ""},
        {"attempt": 2}, {"action": "halt"}, {"params": {}}, {"decided_step": 1}, {"last_step": 10**6},
    ],
)  # fmt: skip
def test_no_field_of_an_approval_can_be_exchanged(changes: dict[str, Any]) -> None:
    sent = verdict(action())
    received = unpack_approval(wire.pack(sent))
    assert approvals.refusal(received, action(), APPROVALS) == ""
    changed = msgspec.structs.replace(received, **changes)
    assert approvals.refusal(changed, action(), APPROVALS) == approvals.NOT_SIGNED
    assert approvals.refusal(verdict(action(), RING), action(), APPROVALS) == approvals.NOT_SIGNED


@pytest.mark.parametrize("ring", [APPROVALS, None])
@pytest.mark.parametrize(
    "changes",
    [
        {"id": "r-1.0002"}, {"run": "s"}, {"attempt": 2}, {"action": "halt"}, {"decided_step": 400},
        {"params": {"layers": ["a"], "skip": 4}}, {"expires_step": None}, {"start": "later"}, {"start": ""},
    ],
)  # fmt: skip
def test_an_approval_counts_for_the_action_that_the_person_saw_and_no_other(changes: Any, ring: Any) -> None:
    """Whatever else in it has changed since: an id comes again when a store has lost its data."""
    given_one = verdict(action(), ring)
    assert approvals.refusal(given_one, action(reason="more is known of it now"), ring) == ""
    assert approvals.refusal(given_one, action(**changes), ring) == approvals.ANOTHER


def test_an_approval_that_names_the_id_only_counts_where_the_store_is_believed() -> None:
    """As an earlier version gave it."""
    bare = Approval(run="r", action_id="r-1.0001", verdict="approve")
    assert approvals.refusal(bare, action(), None) == ""
    signed_one = msgspec.structs.replace(bare, signature=APPROVALS.sign(canonical(bare)))
    assert approvals.refusal(signed_one, action(), APPROVALS) == approvals.ANOTHER


@pytest.mark.parametrize("params", [{"a": {1: 2}}, {"a": msgspec.msgpack.Ext(1, b"x")}])
def test_what_has_no_canonical_form_is_signed_by_nobody(params: dict[str, Any]) -> None:
    """It decodes, and whoever looks at it must not fail for it."""
    received = wire.unpack_reply(wire.pack(command(params=params, signature=b"x" * 32)))
    assert isinstance(received, Command)
    assert not Verifier(RING).command(received)
    for ring, reason in ((APPROVALS, approvals.NOT_SIGNED), (None, approvals.ANOTHER)):
        odd = msgspec.structs.replace(verdict(action(), None), params=params)
        assert approvals.refusal(odd, action(), ring) == reason


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


def test_what_does_not_count_is_said_once_however_often_it_is_looked_at() -> None:
    waiting = {"r-1.0001": action(), "r-1.0002": action(id="r-1.0002", action="halt")}
    good = verdict(action())
    bad = [
        Approval(run="r", action_id="r-1.0001", verdict="approve", time_unix=float("nan")),
        verdict(action(id="r-1.0002")),
    ]
    over = verdict(action(id="r-1.0000"))  # of an action that waits no more
    refused: set[bytes] = set()
    looks = [approvals.sort([good, over, *bad[:count]], waiting, APPROVALS, refused) for count in (1, 1, 2, 2, 0, 1)]
    first, second = f"r-1.0001: {approvals.NOT_SIGNED}", f"r-1.0002: {approvals.ANOTHER}"
    assert [new for _, new in looks] == [[first], [], [second], [], [], [first]]
    assert all(genuine == [good] for genuine, _ in looks)
