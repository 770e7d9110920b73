"""The controller signs what makes a rank do something, and believes only approvals that a console has signed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from controller_sim import Box
from test_ladder import Frozen, policy

from fp8watch.controller.stores.base import Approval
from fp8watch.controller.stores.memory import MemoryStore
from fp8watch.records import ActionRecord
from fp8watch.security import KeyRing, Signer, Verifier, approvals

COMMANDS, CONSOLE = KeyRing("command", (b"c" * 40,)), KeyRing("approval", (b"a" * 40,))


def box(mode: str, **security: Any) -> Box:
    return Frozen("repair_scale").build(policy(mode), security=security)


def test_every_command_is_signed() -> None:
    signed = box("auto", signer=Signer(COMMANDS))
    signed.run(300)
    commands = [command for _, command in signed.rank.applied]
    assert [command.action for command in commands] == ["repair_scale"]
    verifier = Verifier(COMMANDS)
    assert all(verifier.command(command) for command in commands)
    assert signed.rank.updates
    assert all(verifier.ledger(update) for update in signed.rank.updates)


@pytest.mark.parametrize("forged", ["unsigned", "wrong key", "altered", "of another action"])
def test_a_forged_approval_gets_nothing_done_and_a_genuine_one_does(forged: str) -> None:
    run = box("approve", approval_ring=CONSOLE)
    run.run(105)
    (waiting,) = [action for action in run.store.read("r", ActionRecord) if action.status == "waiting"]
    genuine = approvals.sign(Approval(run="r", action_id=waiting.id, verdict="approve", by="me"), CONSOLE)
    fake = {
        "unsigned": msgspec.structs.replace(genuine, signature=b""),
        "wrong key": approvals.sign(genuine, COMMANDS),
        "altered": msgspec.structs.replace(genuine, by="somebody"),
        "of another action": msgspec.structs.replace(
            approvals.sign(msgspec.structs.replace(genuine, action_id="a-0"), CONSOLE), action_id=waiting.id
        ),
    }[forged]
    run.store.approve(fake)
    run.run(110)
    assert run.commanded() == []
    run.store.approve(genuine)
    run.run(115)
    assert [action for _, _, action in run.commanded()] == ["repair_scale"]


def test_without_a_key_the_store_is_believed() -> None:
    run = box("approve")
    assert isinstance(run.store, MemoryStore)
    run.run(105)
    (waiting,) = [action for action in run.store.read("r", ActionRecord) if action.status == "waiting"]
    run.store.approve(Approval(run="r", action_id=waiting.id, verdict="approve"))
    run.run(110)
    assert [action for _, _, action in run.commanded()] == ["repair_scale"]
