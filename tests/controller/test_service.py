"""The service around the pilots: failing stores, people, disarming, halting, restarts, commands that nobody answers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from controller_sim import Box, Signal

from fp8watch.controller import markers
from fp8watch.controller.service import RunController
from fp8watch.controller.stores.base import Approval
from fp8watch.controller.stores.memory import MemoryStore
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.detect.base import Sample
from fp8watch.policy.budgets import refusal
from fp8watch.records import ActionRecord, CheckpointRecord, Finding, Goodbye, Hello, StepFrame, Stored, Welcome

TEXT = """
version: 1
mode: {mode}
rules:
  - name: scales
    when: {{detector: scale_frozen, severity: act}}
    ladder: [{{action: repair_scale, scope: run, settle_steps: 10}}, {{action: halt}}]
"""


def frozen(sample: Sample) -> Iterable[Signal]:
    return [("scale_frozen", "bookkeeping", ("a",))] if sample.step >= 50 else []


def box(mode: str = "auto", **options: object) -> Box:
    return Box(
        TEXT.format(mode=mode), numbers=lambda step, rank: {}, script=frozen, layers=("a",), **options  # type: ignore[arg-type]
    )  # fmt: skip


class FullDisk(MemoryStore):
    """Takes nothing from a step on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = False

    def append(self, run: str, records: Iterable[Stored]) -> None:
        if self.is_full:
            raise OSError("no space left on device")
        super().append(run, records)


def test_deciding_goes_on_when_the_store_fails() -> None:
    store = FullDisk()
    scene = box(store=store)
    heard: list[Stored] = []
    scene.controller._listener = heard.append
    store.is_full = True
    scene.run(60)
    assert [action for _, _, action in scene.commanded()] == ["repair_scale"]
    assert scene.controller.store_errors["r"] > 50
    assert any(isinstance(record, Finding) for record in heard), "the exporter hears of it all the same"


def test_an_action_waits_for_a_person_and_is_done_when_approved() -> None:
    scene = box("approve")
    scene.run(70)
    (waiting,) = scene.actions()
    assert (waiting.status, waiting.mode) == ("waiting", "approve")
    assert scene.commanded() == []
    scene.store.approve(Approval(run="r", action_id=waiting.id, verdict="approve"))
    scene.run(90)
    assert [action for _, _, action in scene.commanded()] == ["repair_scale"]
    assert scene.actions()[0].status == "applied"


def test_a_refused_action_is_not_done() -> None:
    scene = box("approve")
    scene.run(70)
    scene.store.approve(Approval(run="r", action_id=scene.actions()[0].id, verdict="refuse"))
    scene.run(200)
    assert scene.commanded() == []
    assert [record.status for record in scene.actions()] == ["refused"]


def test_disarmed_nothing_is_sent_and_armed_again_it_is(tmp_path: Path) -> None:
    scene = box()
    scene.controller._directory = tmp_path
    markers.disarm(tmp_path, "r")
    scene.run(60)
    assert scene.commanded() == []
    (record,) = scene.actions()
    assert record.status == "proposed"
    assert "disarmed by" in record.reason
    assert markers.rearm(tmp_path, "r")
    assert not markers.rearm(tmp_path, "r")


def test_a_halt_is_written_down_where_attach_looks(tmp_path: Path) -> None:
    scene = box()
    scene.controller._directory = tmp_path
    scene.run(100)
    assert scene.rank.halted
    assert markers.is_halted(tmp_path, "r")
    assert next(iter(scene.store.runs())).state == "halted"
    assert (tmp_path / "runs" / "r" / "halted.json").exists()
    assert markers.release(tmp_path, "r")
    assert not markers.is_halted(tmp_path, "r")


def test_the_end_and_a_lost_connection_are_told_apart() -> None:
    ended = box()
    ended.run(10)
    ended.controller.receive(Goodbye(run="r", rank=0, step=10, reason="end"))
    ended.controller.lost("r", 0)
    assert ended.controller.state("r").state == "ended"  # type: ignore[union-attr]
    lost = box()
    lost.run(10)
    lost.controller.lost("r", 0)
    assert lost.controller.state("r").state == "lost"  # type: ignore[union-attr]
    assert [record.state for record in lost.store.runs()] == ["lost"]


# case: SPK-06
def test_a_restarted_controller_repeats_no_id_and_knows_its_budgets(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.sqlite")
    first = box(store=store)
    first.run(70)
    before = {record.id for record in store.read("r", ActionRecord)}
    findings = {record.id for record in store.read("r", Finding)}
    second = box(store=store)
    second.rank.step = 70
    second.run(130)
    after = [record.id for record in store.read("r", ActionRecord)]
    assert before < set(after)
    assert len(after) == len(set(after))
    assert findings < {record.id for record in store.read("r", Finding)}
    store.close()


def test_ids_stay_apart_over_many_restarts_of_a_run_that_is_only_observed() -> None:
    store = MemoryStore()
    for start in range(3):
        box("observe", store=store).run(60 + start)
    found = [record.id for record in store.read("r", Finding)]
    assert len(found) == len(set(found)) == 3, "the term, which grows with commands only, cannot tell starts apart"


def test_actions_of_long_ago_do_not_spend_the_budget_of_a_restarted_run() -> None:
    def refused(reached: int) -> str | None:
        store = MemoryStore()
        box(store=store)
        done = [
            ActionRecord(
                id=f"r-1.{step:04d}", run="r", attempt=0, action="hold_lr", params={}, rule="x", finding="f",
                decided_step=step, applied_step=step, status="applied", readback="ok",
            )
            for step in (100, 200, 300, 400)
        ]  # fmt: skip
        known = next(iter(store.runs()))
        store.append("r", [*done, msgspec.structs.replace(known, last_step=reached)])
        pilot = box(store=store).controller._runs["r"].pilot
        return refusal(pilot.policy.budgets, pilot._state.spent, "hold_lr", seen=1, time_unix=0.0)

    assert refused(500) is not None
    assert refused(50_000) is None


def test_a_clock_that_is_set_back_does_not_put_off_a_disarming(tmp_path: Path) -> None:
    scene = box()
    scene.controller._directory = tmp_path
    scene.run(40)
    scene.now -= 3600.0
    markers.disarm(tmp_path, "r")
    scene.run(60)
    assert scene.commanded() == []


def test_what_waits_for_a_person_expires_when_the_run_is_resumed() -> None:
    scene = box("approve")
    scene.run(70)
    scene.rank.attempt += 1
    scene._hello()
    (record,) = scene.actions()
    assert record.status == "expired"
    assert "attempt 1 began" in record.reason


@pytest.mark.parametrize(("pid", "is_new"), [(1, False), (2, True)])
def test_a_start_before_the_end_of_the_last_process_was_noticed_is_no_rollback(pid: int, is_new: bool) -> None:
    scene = box(checkpoint_steps=(10, 20))
    scene.run(40)
    pilot = scene.controller._runs["r"].pilot
    hello = pilot.ranks[0]
    scene.controller.receive(msgspec.structs.replace(hello, pid=pid, attempt=1, step=0))
    assert (scene.controller._runs["r"].pilot is not pilot) == is_new
    labels = {record.label for record in scene.store.read("r", CheckpointRecord)}
    assert labels == ({"good"} if is_new else {"tainted"})


@pytest.mark.parametrize(("pid", "state"), [(1, True), (2, False)])
def test_a_new_training_process_has_nothing_in_force(tmp_path: Path, pid: int, state: bool) -> None:
    store = MemoryStore()
    held = ActionRecord(
        id="r-1.0001", run="r", attempt=0, action="hold_lr", params={"factor": 0.5}, rule="x", finding="f",
        decided_step=3, status="applied", readback="ok",
    )  # fmt: skip
    first = RunController(store, clock=lambda: 0.0)
    hello = Hello(
        wire_version=1, run="r", attempt=0, rank=0, local_rank=0, world_size=1, pid=1, host="h", time_unix=0, step=0
    )
    first.receive(hello)
    store.append("r", [held])
    second = RunController(store, clock=lambda: 0.0)
    second.receive(msgspec.structs.replace(hello, pid=pid, step=9))
    assert bool(second._runs["r"].pilot._state.in_force) == state


def test_a_connection_that_comes_back_goes_on_where_it_was() -> None:
    scene = box()
    scene.run(30)
    pilot = scene.controller._runs["r"].pilot
    scene.controller.lost("r", 0)
    scene._hello()
    scene.run(40)
    assert scene.controller._runs["r"].pilot is pilot
    assert pilot.seen == 40
    assert scene.controller.state("r").state == "running"  # type: ignore[union-attr]


def test_a_command_that_nobody_answers_expires() -> None:
    scene = box()
    scene._lag = 10_000
    scene.run(200)
    assert scene.actions()[0].status == "expired"
    assert scene.actions()[0].readback == "pending"


def test_a_policy_that_is_none_observes() -> None:
    scene = Box("mode: [auto\n", numbers=lambda step, rank: {}, script=frozen)
    scene.run(80)
    assert scene.commanded() == []
    assert scene.actions() == []


def test_the_controllers_own_mode_caps_the_runs() -> None:
    store = MemoryStore()
    scene = box(store=store)
    scene.controller = RunController(
        store, clock=lambda: scene.now, max_mode="observe", make_pipeline=lambda run: scene.pipeline  # type: ignore[arg-type, return-value]
    )  # fmt: skip
    scene._hello()
    scene.run(80)
    assert scene.commanded() == []
    assert [record.status for record in scene.actions()] == ["proposed"]


def test_a_failing_detector_does_not_stop_the_record() -> None:
    def broken(sample: Sample) -> Iterable[Signal]:
        raise ValueError("no such thing")

    scene = Box(TEXT.format(mode="auto"), numbers=lambda step, rank: {}, script=broken)
    scene.run(20)
    assert len(list(scene.store.read("r", StepFrame))) == 20
    assert scene.controller._runs["r"].pilot.detector_errors == 20
    assert scene.controller.unseen.counts["r"]["detectors_failed"] == 20, (
        "nobody has looked at these steps, which has to show"
    )


def test_a_message_before_any_hello_is_counted_and_ignored() -> None:
    controller = RunController(MemoryStore(), clock=lambda: 0.0)
    assert controller.receive(Goodbye(run="x", rank=0, step=1)) == []
    assert controller.ignored["no hello"] == 1
    assert controller.lost("x", 0) == []
    assert controller.tick() == []


def test_the_term_is_above_every_one_the_rank_has_seen() -> None:
    controller = RunController(MemoryStore(), clock=lambda: 0.0)
    hello = Hello(
        wire_version=1, run="r", attempt=0, rank=0, local_rank=0, world_size=1, pid=1, host="h", time_unix=0, step=0,
        journal_term=7,
    )  # fmt: skip
    (welcome,) = controller.receive(hello)
    assert isinstance(welcome, Welcome)
    assert welcome.term == 8


@pytest.mark.parametrize("missing", [0, 1])
def test_two_ranks_are_one_run_and_one_that_is_lost_does_not_hold_it_up(missing: int) -> None:
    store = MemoryStore()
    controller = RunController(store, clock=lambda: 0.0)
    hello = Hello(
        wire_version=1, run="r", attempt=0, rank=0, local_rank=0, world_size=2, pid=1, host="h", time_unix=0, step=0
    )
    for rank in (0, 1):
        controller.receive(msgspec.structs.replace(hello, rank=rank))

    def frame(rank: int, step: int, loss: float) -> None:
        controller.receive(
            StepFrame(
                run="r", attempt=0, rank=rank, step=step, layout_id=0, time_unix=0, scalars={"loss": loss}
            )
        )  # fmt: skip

    for step in range(1, 6):
        frame(0, step, 2.0)
        frame(1, step, 2.0)
    controller.lost("r", missing)
    frame(1 - missing, 6, math.nan)
    (found,) = [item for item in store.read("r", Finding) if item.detector == "nonfinite"]
    assert found.step == 6
