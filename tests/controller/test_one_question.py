"""Two rules that begin with the same action ask a person once, and the answer holds for both incidents."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from controller_sim import Box, Signal
from typer.testing import CliRunner

from fp8watch.cli import build
from fp8watch.controller.stores.base import Approval
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.detect.base import Sample
from fp8watch.records import ActionRecord, CheckpointRecord, TraceEntry

POLICY = """
version: 1
mode: approve
approval: {timeout_steps: 40, default: refuse}
budgets: {actions_per_1000_steps: 20, rollbacks_per_24h: 9}
rules:
  - name: loss
    when: {detector: loss_spike, severity: act}
    ladder: [{action: FIRST}, {action: rewarm, steps: 50, settle_steps: 10}]
  - name: updates
    when: {detector: update_rms, severity: act}
    ladder: [{action: SECOND}, {action: LAST}]
"""
HOLD = "hold_lr, factor: 0.5, settle_steps: 10"


class Two:
    """A loss spike from step 100 on and too large updates from 103 on; `cured`: what an action in force ends."""

    def __init__(
        self, first: str = HOLD, second: str = HOLD, *, cured: Iterable[str] = (), last: str = "halt", **options: Any
    ) -> None:
        self.cured = set(cured)
        self.layers: dict[str, tuple[str, ...]] = {"loss_spike": (), "update_rms": ()}
        self.begin, self.end = {"loss_spike": 100, "update_rms": 103}, 400
        text = POLICY.replace("FIRST", first).replace("SECOND", second).replace("LAST", last)
        self.box = Box(text, numbers=lambda step, rank: {}, script=self.signals, layers=("a", "b", "c"), **options)

    def signals(self, sample: Sample) -> Iterable[Signal]:
        for detector, begin in self.begin.items():
            is_cured = detector in self.cured and bool(self.box.rank.in_force)
            if begin <= sample.step < self.end and not is_cured and sample.attempt == 0:
                yield (detector, "optimisation", self.layers[detector])

    def questions(self) -> list[ActionRecord]:
        return [record for record in self.box.actions() if record.status == "waiting"]

    def answer(self, verdict: str, action: ActionRecord | None = None) -> None:
        action = action or self.questions()[0]
        self.box.store.approve(
            Approval(
                run="r", action_id=action.id, verdict=verdict, by="mara", attempt=action.attempt, action=action.action,  # type: ignore[arg-type]
                params=action.params, decided_step=action.decided_step, last_step=action.expires_step,
            )
        )  # fmt: skip
        self.box.controller.look()

    def told(self, incident: str) -> list[tuple[str, str]]:
        lines = self.box.store.read("r", TraceEntry)
        return [(line.event, line.action) for line in lines if line.incident == incident and line.event != "found"]


def test_one_question_for_both_and_one_command() -> None:
    two = Two(cured=("loss_spike", "update_rms"))
    two.box.run(110)
    (asked,) = two.questions()
    assert (asked.incident, asked.also, asked.action) == ("i1", ["i2"], "hold_lr")
    assert "also for i2 (update_rms since step 103)" in asked.reason
    two.answer("approve")
    two.box.run(150)
    assert [(verb, action) for _, verb, action in two.box.commanded()] == [("apply", "hold_lr")]
    (done,) = two.box.actions()
    assert (done.status, done.outcome, done.answered_by) == ("applied", "helped", "mara")
    assert two.told("i1") == [
        ("waiting", "hold_lr"), ("person", "hold_lr"), ("ordered", "hold_lr"), ("concluded", "hold_lr"),
        ("outcome", "hold_lr"),
    ]  # fmt: skip
    assert two.told("i2") == [("held_back", "hold_lr"), ("person", "hold_lr"), ("outcome", "hold_lr")]


def test_a_no_is_a_no_for_both() -> None:
    two = Two()
    two.box.run(110)
    two.answer("refuse")
    two.box.run(200)
    assert [(record.status, record.answered_by) for record in two.box.actions()] == [("refused", "mara")]
    assert ("person", "hold_lr") in two.told("i2")
    assert two.box.commanded() == []


def test_nobody_answers_either_of_them() -> None:
    two = Two()
    two.box.run(200)
    (asked,) = two.box.actions()
    assert (asked.status, asked.expires_step) == ("expired", 140)
    assert two.told("i1")[-1] == two.told("i2")[-1] == ("person", "hold_lr")


def test_what_helps_one_only_stays_in_force_and_the_other_goes_on_with_its_own_ladder() -> None:
    for helped, left in (("loss_spike", "halt"), ("update_rms", "rewarm")):
        two = Two(cured=(helped,))
        two.box.run(110)
        two.answer("approve")
        two.box.run(130)
        hold, following = two.box.actions()
        assert (hold.outcome, hold.status) == ("helped", "applied")
        assert "hold_lr" in two.box.rank.in_force
        assert (following.action, following.status) == (left, "waiting")


def test_what_helps_neither_is_undone_once_and_both_go_on() -> None:
    two = Two(last="recheck")
    two.box.run(110)
    two.answer("approve")
    two.box.run(135)
    assert [(verb, action) for _, verb, action in two.box.commanded()] == [("apply", "hold_lr"), ("revert", "hold_lr")]
    assert two.box.actions("hold_lr")[0].outcome == "no_effect"
    assert {record.action for record in two.questions()} == {"rewarm", "recheck"}


def test_what_helps_neither_stays_where_a_next_rung_builds_on_it() -> None:
    two = Two()
    two.box.run(110)
    two.answer("approve")
    two.box.run(135)
    assert [(verb, action) for _, verb, action in two.box.commanded()] == [("apply", "hold_lr")]
    assert {record.action for record in two.questions()} == {"rewarm", "halt"}


def test_a_command_that_is_not_in_force_when_read_back_has_failed_for_both() -> None:
    two = Two()
    two.box.rank.unread = ("hold_lr",)
    two.box.run(110)
    two.answer("approve")
    two.box.run(125)
    assert {record.action for record in two.questions()} == {"rewarm", "halt"}
    assert [(verb, action) for _, verb, action in two.box.commanded()] == [("apply", "hold_lr"), ("revert", "hold_lr")]


BF16 = "bf16_layers, max_share: 1.0, settle_steps: 10"
APART = [
    (HOLD, "hold_lr, factor: 0.1", ((), ())),
    (HOLD, "tighten_clip, max_norm: 1.0", ((), ())),
    ("tighten_clip, times_median: 1.5", "tighten_clip, times_median: 3.0", ((), ())),
    (BF16, BF16, (("a",), ("b",))),
    (BF16, BF16, (("a",), ("a", "b"))),
    ("rollback", "rollback, skip_batches: 50", ((), ())),
    ("rollback", "rollback, changes: [{action: bf16_all}]", ((), ())),
]
TOGETHER = [
    (BF16, BF16, (("a", "b"), ("b", "a"))),
    (HOLD, "hold_lr, factor: 0.5, settle_steps: 30, hold_steps: 9", (("a",), ("b",))),
    ("tighten_clip", "tighten_clip", ((), ())),
    ("rollback", "rollback, settle_steps: 5", ((), ())),
    ("halt", "halt", ((), ())),
]


@pytest.mark.parametrize(
    ("first", "second", "layers", "count"), [(*case, 2) for case in APART] + [(*case, 1) for case in TOGETHER]
)
def test_the_same_question_is_the_same_action_at_the_same_place(
    first: str, second: str, layers: tuple[tuple[str, ...], tuple[str, ...]], count: int
) -> None:
    two = Two(first, second, checkpoint_steps=(50,))
    two.layers = dict(zip(("loss_spike", "update_rms"), layers, strict=True))
    two.box.run(110)
    assert len(two.questions()) == count, [record.params for record in two.questions()]


@pytest.mark.parametrize(("ranks", "count"), [((None, None), 1), ((3, 3), 1), ((3, 4), 2), ((None, 4), 2)])
def test_different_ranks_are_asked_about_apart(ranks: tuple[int | None, int | None], count: int) -> None:
    two = Two("halt", "halt")
    assert two.box.pipeline is not None
    incidents = two.box.pipeline.open_incidents

    def of_ranks() -> Any:
        found = incidents()
        for incident in found:
            incident.rank = ranks[incident.detector == "update_rms"]
        return found

    two.box.pipeline.open_incidents = of_ranks  # type: ignore[method-assign]
    two.box.run(110)
    assert len(two.questions()) == count


def test_a_restart_ends_the_question_for_both() -> None:
    two = Two(checkpoint_steps=(50,))
    two.box.run(110)
    two.box.rank.step, two.box.rank.attempt = 50, 1
    two.box._hello()
    assert [record.status for record in two.box.actions()] == ["expired"]
    assert two.told("i1")[-1][0] == two.told("i2")[-1][0] == "person"


def test_the_story_of_either_incident_has_the_action(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    with contextlib.closing(SqliteStore(folder / "store.sqlite")) as store:
        two = Two(cured=("loss_spike", "update_rms"), store=store)
        two.box.run(110)
        two.answer("approve")
        two.box.run(150)

        def call(*arguments: str) -> Any:
            result = CliRunner().invoke(build(), ["incident", *arguments, "--dir", str(tmp_path), "--json"])
            assert result.exit_code == 0, result.output
            return json.loads(result.stdout)

        (done,) = two.box.actions()
        assert [item["actions"] for item in call("list")] == [[done.id], [done.id]]
        for name in ("i1", "i2"):
            story = call("show", name)
            assert [item["id"] for item in story["actions"]] == [done.id]
            assert {"ordered", "concluded", "outcome"} <= {item["event"] for item in story["trace"]}


def test_a_checkpoint_waits_for_the_answer_to_the_joined_question_too() -> None:
    two = Two(checkpoint_steps=(150,))
    two.end = 110
    two.begin = {"loss_spike": 90, "update_rms": 103}
    text = POLICY.replace("FIRST", HOLD).replace("SECOND", HOLD).replace("LAST", "halt")
    two.box = Box(
        text.replace("timeout_steps: 40", "timeout_steps: 90"),
        numbers=lambda step, rank: {}, script=two.signals, checkpoint_steps=(150,),
    )  # fmt: skip
    two.box.run(170)
    (saved,) = two.box.store.read("r", CheckpointRecord)
    assert saved.label == "candidate"
    assert "a person was asked about hold_lr" in saved.reason
