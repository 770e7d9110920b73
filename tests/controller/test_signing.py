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


@pytest.mark.parametrize("forged", ["unsigned", "wrong key", "altered", "of another action", "of another start"])
def test_a_forged_approval_gets_nothing_done_and_a_genuine_one_does(forged: str) -> None:
    run = box("approve", approval_ring=CONSOLE)
    run.run(105)
    (waiting,) = [action for action in run.store.read("r", ActionRecord) if action.status == "waiting"]

    def approve(action: ActionRecord, ring: KeyRing | None) -> Approval:
        return approvals.give(action, "approve", by="me", time_unix=1.0, ring=ring)

    genuine = approve(waiting, CONSOLE)
    fake = {
        "unsigned": approve(waiting, None),
        "wrong key": approve(waiting, COMMANDS),
        "altered": msgspec.structs.replace(genuine, by="somebody"),
        "of another action": approve(msgspec.structs.replace(waiting, action="checkpoint_now"), CONSOLE),
        "of another start": approve(msgspec.structs.replace(waiting, start="earlier"), CONSOLE),
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
