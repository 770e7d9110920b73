"""A standby that takes over goes on asking: the same question, with the same end."""

from __future__ import annotations

import pytest
import test_controller_memory as parts

from fp8watch.controller.stores.base import Approval
from fp8watch.records import ActionRecord

POLICY = """version: 1
mode: auto
approval: {timeout_steps: 20, default: refuse}
rules:
  - name: broken
    when: {detector: nonfinite, severity: act}
    ladder: [{action: hold_lr, factor: 0.5, settle_steps: 5}, {action: rewarm, mode: approve}]
"""


@pytest.mark.parametrize("answer", ["approve", "refuse", None])
def test_a_question_outlives_its_controller(answer: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "POLICY", POLICY)
    nodes = parts.Nodes()

    def train(first: int, last: int) -> None:
        for step in range(first, last + 1):
            nodes.step(step)

    def question() -> ActionRecord:
        (found,) = [item for item in nodes.store.read("r", ActionRecord) if item.action == "rewarm"]
        return found

    def commanded() -> list[str]:
        return [command.action for command in nodes.applied]

    train(1, 51)  # the loss is not finite at step 25, and again at step 50
    asked = question()
    assert (asked.status, asked.decided_step) == ("waiting", 50)
    train(52, 55)
    nodes.swap()
    train(56, 60)
    nodes.swap()
    assert question() == asked
    assert commanded() == ["hold_lr"], "nothing but the rung in auto"
    if answer is not None:
        nodes.store.approve(Approval(run="r", action_id=asked.id, verdict=answer))
        nodes.controller.look()
    train(61, 74)
    assert question().status == {"approve": "applied", "refuse": "refused", None: "expired"}[answer]
    assert commanded() == ["hold_lr", "rewarm"][: 2 if answer == "approve" else 1]
