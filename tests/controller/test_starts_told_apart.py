"""A start of the training processes has a name: commands, labels and actions carry it, answers are matched by it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from controller_sim import Box, Signal

from fp8watch.controller.commands import CommandTracker
from fp8watch.controller.processes import is_same_process, is_started_anew
from fp8watch.controller.stores.memory import MemoryStore
from fp8watch.detect.base import Sample
from fp8watch.records import CheckpointRecord, CommandResult, Hello

POLICY = """
version: 1
mode: auto
rules:
  - name: scales
    when: {detector: scale_frozen, severity: act}
    ladder: [{action: hold_lr, factor: 0.5, settle_steps: 500, hold_steps: 1000}]
"""


def frozen(sample: Sample) -> Iterable[Signal]:
    return [("scale_frozen", "bookkeeping", ("a",))] if sample.step >= 50 else []


def box(start: str, **more: Any) -> Box:
    return Box(
        POLICY, numbers=lambda step, rank: {}, script=frozen, layers=("a",), start=start, checkpoint_steps=[10, 60],
        **more,
    )  # fmt: skip


def hello(**changes: Any) -> Hello:
    fields: dict[str, Any] = {
        "wire_version": 1, "run": "r", "attempt": 0, "rank": 0, "local_rank": 0, "world_size": 2, "pid": 7,
        "host": "pod", "time_unix": 0.0, "step": 0, "start": "first",
    }  # fmt: skip
    return Hello(**(fields | changes))


@pytest.mark.parametrize("start", ["first", ""])
def test_all_that_ranks_are_told_names_their_start(start: str) -> None:
    """Nothing, where a training process of an earlier version has not named it: it does what it is told as before."""
    run = box(start)
    run.run(300)
    assert [action for _, _, action in run.commanded()] == ["hold_lr"]
    assert {command.start for _, command in run.rank.applied} == {start}
    assert {update.start for update in run.rank.updates} == {start}
    assert {action.start for action in run.actions()} == {start}
    assert run.actions()[0].status == "applied"


def test_an_answer_to_an_earlier_start_s_command_of_the_same_id_is_none_to_this_one() -> None:
    desk = CommandTracker("r", term=1)
    ranks = frozenset({0})
    command = desk.issue("r-1.0001", "apply", "halt", {}, step=5, seen=5, attempt=0, ranks=ranks, start="second")
    answer = CommandResult(
        id=command.id, run="r", attempt=0, rank=0, verb="apply", step=6, status="expired", start="first"
    )  # fmt: skip
    assert desk.take(answer) is None
    assert desk.conclude(6, ranks) is None, "it is still on its way"
    assert desk.take(msgspec.structs.replace(answer, start="second")) is not None
    conclusion = desk.conclude(6, ranks)
    assert conclusion is not None
    assert conclusion.result == "expired"


def test_a_pod_started_again_is_another_start_though_name_process_and_attempt_are_the_same() -> None:
    """As where a container's process is always number 1 and its folder is new."""
    known = hello()
    assert is_same_process(known, hello())
    assert not is_same_process(known, hello(start="second"))
    assert is_started_anew({0: known}, known, hello(start="second"))
    # The rank that comes first may be one that was lost before, while others are still thought to be there.
    assert is_started_anew({0: known}, known, hello(rank=1, start="second"))
    assert not is_started_anew({0: known}, known, hello(rank=1, pid=8))
    # Ranks that did not meet, and those of an earlier version, have no name in common.
    assert not is_started_anew({0: known}, known, hello(rank=1, pid=8, start=""))
    assert is_same_process(hello(start=""), hello(start=""))


def test_nothing_is_in_force_in_a_pod_that_was_started_again() -> None:
    store = MemoryStore()
    run = box("first", store=store)
    run.run(70)
    assert run.rank.in_force
    kept = box("first", store=store).controller._runs["r"].pilot
    assert [held.action for held in kept._state.in_force] == ["hold_lr"], "the agent was restarted, not the run"
    again = box("second", store=store).controller._runs["r"].pilot
    assert (again._state.in_force, again.start) == ((), "second")


def test_a_verdict_that_the_last_start_has_not_heard_is_told_to_the_next_one() -> None:
    """It names the start that it was given to, and is not handed to another."""
    store = MemoryStore()
    run = box("first", store=store)
    run.run(70)
    tainted = [record for record in store.read("r", CheckpointRecord) if record.label == "tainted"]
    assert [record.step for record in tainted] == [60]
    again = box("second", store=store)
    for told in (tainted[0], msgspec.structs.replace(tainted[0], label="candidate", reason="")):
        again._route(again.controller.receive(told))
    assert [(item.checkpoint, item.label, item.start) for item in again.rank.updates] == [
        (tainted[0].checkpoint, "tainted", "second")
    ]
    other = msgspec.structs.replace(tainted[0], label="candidate", time_unix=9.0)
    again._route(again.controller.receive(other))
    assert len(again.rank.updates) == 1, "that one was saved at another time, by a run that has only the name"
