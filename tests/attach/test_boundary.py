"""Commands at the boundary: what is carried out, what is refused and why, what is said about the effect."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from watched_training import START, command

from fp8watch.actions.base import Applied, ReadBack
from fp8watch.checkpoints.restore import PartlyRestored
from fp8watch.errors import ActionError, PartlyChanged
from fp8watch.records import Command, CommandResult
from fp8watch.settings import Settings
from fp8watch.training.agreement import Agreement, ObserveOnly, SingleProcess
from fp8watch.training.boundary import READBACK_STEPS, Boundary
from fp8watch.training.disarm import Disarm
from fp8watch.training.journal import Journal


class Knob:
    """An action on one number; the read-back looks at the number."""

    name = "tighten_clip"

    def __init__(self) -> None:
        self.value = 0.0
        self.is_no_op = False
        self.visible_after = 0
        self.error: Exception | None = None
        self.journal: Path | None = None
        self.journal_at_apply = ""

    def unavailable(self) -> str | None:
        return None

    def apply(self, step: int, params: dict[str, Any]) -> Applied:
        if self.journal is not None:
            self.journal_at_apply = self.journal.read_text()
        if self.error is not None:
            raise self.error
        before = self.value
        if not self.is_no_op:
            self.value = params["value"]
        return Applied(step=step, params=params, before={"value": before})

    def read_back(self, applied: Applied) -> ReadBack:
        if self.visible_after > 0:
            self.visible_after -= 1
            return ReadBack(ok=None)
        return ReadBack(ok=self.value == applied.params["value"], observed={"value": self.value})

    def revert(self, applied: Applied) -> None:
        if not self.is_no_op:
            self.value = applied.before["value"]

    def read_back_revert(self, applied: Applied) -> ReadBack:
        return ReadBack(ok=self.value == applied.before["value"], observed={"value": self.value})


class Rig:
    def __init__(self, folder: Path, *, mode: str = "auto", agreement: Agreement | None = None) -> None:
        self.folder = folder
        self.settings = Settings(dir=folder)
        self.knob = Knob()
        self.results: list[CommandResult] = []
        self.attempt = 0
        self.broken: list[str] = []
        self.reasons: dict[str, str] = {}
        self.journal = Journal(folder / "runs" / "r", 0)
        self.boundary = Boundary(
            rank=0,
            actions={"tighten_clip": self.knob},
            capabilities=lambda: self.reasons,
            journal=self.journal,
            agreement=agreement or SingleProcess(),
            disarm=Disarm(self.settings, "r"),
            mode=mode,  # type: ignore[arg-type]
            send=self.results.append,
            attempt=lambda: self.attempt,
            start=START,
            on_broken=self.broken.append,
        )

    def run(self, step: int, *commands: Command) -> list[CommandResult]:
        for given in commands:
            self.boundary.receive(given)
        before = len(self.results)
        self.boundary.run(step)
        return self.results[before:]


def clip(value: float = 0.5, **fields: Any) -> Command:
    return command("tighten_clip", params={"value": value}, **fields)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_applied_then_read_back(rig):
    applied, confirmed = rig.run(7, clip())
    assert (applied.status, applied.readback, applied.step) == ("applied", "pending", 7)
    assert (confirmed.status, confirmed.readback, confirmed.observed) == ("applied", "ok", {"value": 0.5})
    assert rig.knob.value == 0.5
    assert rig.boundary.is_idle


def test_effect_that_shows_later_is_looked_for_again(rig):
    rig.knob.visible_after = 3
    assert [r.readback for r in rig.run(1, clip())] == ["pending"]
    assert rig.run(2) == []
    assert rig.run(3) == []
    (confirmed,) = rig.run(4)
    assert (confirmed.readback, confirmed.step) == ("ok", 1)


def test_remedy_that_does_nothing_is_reported_as_failed(rig):
    rig.knob.is_no_op = True
    assert [r.readback for r in rig.run(1, clip())] == ["pending", "failed"]


def test_effect_that_never_shows_is_a_failed_readback(rig):
    rig.knob.visible_after = 10_000
    rig.run(1, clip())
    found = [result for step in range(2, 2 + READBACK_STEPS) for result in rig.run(step)]
    assert [r.readback for r in found] == ["failed"]
    assert "no effect was seen" in found[0].detail
    assert rig.boundary.is_idle


def test_revert_puts_back_what_was(rig):
    rig.run(1, clip())
    reverted, confirmed = rig.run(2, clip(verb="revert", sequence=2))
    assert (reverted.verb, reverted.status, reverted.readback) == ("revert", "applied", "pending")
    assert (confirmed.verb, confirmed.readback, confirmed.observed) == ("revert", "ok", {"value": 0.0})
    assert rig.knob.value == 0.0
    assert rig.boundary.is_idle


def test_a_revert_that_does_nothing_is_reported_as_failed(rig):
    rig.run(1, clip())
    rig.knob.is_no_op = True
    assert [r.readback for r in rig.run(2, clip(verb="revert", sequence=2))] == ["pending", "failed"]


def test_revert_of_what_this_process_never_applied_fails(rig):
    (result,) = rig.run(2, clip(verb="revert"))
    assert result.status == "failed"
    assert "not applied by this process" in result.detail


@pytest.mark.parametrize(
    ("fields", "status", "detail"),
    [
        ({"last_step": 4}, "expired", "had to begin by step 4"),
        ({"attempt": 1}, "expired", "attempt 1"),
        ({"action": "conjure"}, "unavailable", "conjure"),
    ],
)
def test_what_is_not_begun_is_answered_with_the_reason(rig, fields, status, detail):
    (result,) = rig.run(5, clip(**fields))
    assert result.status == status
    assert detail in result.detail
    assert rig.knob.value == 0.0
    assert '"begin"' not in rig.journal.path.read_text()


def test_last_step_itself_is_in_time(rig):
    assert rig.run(5, clip(last_step=5))[0].status == "applied"


def test_unavailable_action_says_why(rig):
    rig.reasons["tighten_clip"] = "no clip here"
    (result,) = rig.run(1, clip())
    assert (result.status, result.detail) == ("unavailable", "no clip here")


def test_observing_policy_vetoes_whoever_sent_it(tmp_path):
    rig = Rig(tmp_path, mode="observe")
    (result,) = rig.run(1, clip())
    assert result.status == "vetoed"
    assert rig.knob.value == 0.0


def test_several_ranks_carry_nothing_out(tmp_path):
    rig = Rig(tmp_path, agreement=ObserveOnly("ranks do not know each other"))
    (result,) = rig.run(1, clip())
    assert (result.status, result.detail) == ("unavailable", "ranks do not know each other")


@pytest.mark.parametrize("how", ["variable", "file", "run file"])
def test_disarmed_from_the_next_boundary_on(rig, how, monkeypatch):
    assert rig.run(1, clip())[0].status == "applied"
    if how == "variable":
        monkeypatch.setenv("FP8WATCH_DISARM", "1")
    else:
        (rig.folder / ("disarm" if how == "file" else "runs/r/disarm")).touch()
    (result,) = rig.run(2, clip(0.9, id="b", sequence=2))
    assert result.status == "vetoed"
    assert "disarm" in result.detail.lower()
    assert rig.knob.value == 0.5


@pytest.mark.parametrize("value", ["", "0", "false", "no"])
def test_disarm_variable_that_says_no_disarms_nothing(rig, value, monkeypatch):
    monkeypatch.setenv("FP8WATCH_DISARM", value)
    assert rig.run(1, clip())[0].status == "applied"


def test_commands_are_carried_out_in_order_of_term_and_sequence(rig):
    rig.run(1, clip(3.0, id="c", sequence=3), clip(1.0, id="a", sequence=1), clip(2.0, id="b", sequence=2))
    assert [r.id for r in rig.results if r.readback == "pending"] == ["a", "b", "c"]
    assert rig.knob.value == 3.0


def test_older_term_is_refused(rig):
    rig.run(1, clip(term=5, sequence=1))
    (result,) = rig.run(2, clip(0.9, id="late", term=4, sequence=9))
    assert result.status == "vetoed"
    assert rig.journal.term == 5
    assert rig.run(3, clip(0.9, id="next", term=6, sequence=1))[0].status == "applied"


# case: RED-01
def test_repeated_command_gets_the_same_answer_and_is_not_done_twice(rig):
    rig.run(1, clip())
    rig.knob.value = 7.0
    (again,) = rig.run(2, clip())
    assert (again.status, again.readback, again.step) == ("applied", "ok", 1)
    assert rig.knob.value == 7.0


def test_journal_is_on_disk_before_anything_is_touched(rig):
    rig.knob.journal = rig.journal.path
    rig.run(3, clip())
    begun = [json.loads(line) for line in rig.knob.journal_at_apply.splitlines()]
    assert [(entry["event"], entry.get("id")) for entry in begun] == [("begin", "a-tighten_clip")]


def test_command_begun_and_not_finished_is_unknown_and_never_tried_again(rig, tmp_path):
    rig.journal.begin(clip(), 3)
    rig.journal.path.write_bytes(rig.journal.path.read_bytes() + b'{"event": "beg')  # the crash
    after = Rig(tmp_path)
    after.boundary.report_unfinished("r", 1)
    (told,) = after.results
    assert (told.status, told.step) == ("unknown", 3)
    (result,) = after.run(4, clip())
    assert result.status == "unknown"
    assert after.knob.value == 0.0
    after.run(5, clip(0.25, id="new", sequence=2))
    assert Journal(tmp_path / "runs" / "r", 0).sequence == 2  # lines after the torn one are whole


def test_unwritable_journal_means_nothing_is_done(rig, monkeypatch):
    monkeypatch.setattr(rig.journal, "path", rig.folder / "gone" / "journal")
    (result,) = rig.run(1, clip())
    assert result.status == "failed"
    assert "nothing was done" in result.detail
    assert rig.knob.value == 0.0


@pytest.mark.parametrize("error", [ActionError("no memory"), KeyError("layer"), RuntimeError("CUDA")])
def test_failing_action_is_answered_and_does_not_raise(rig, error):
    rig.knob.error = error
    (result,) = rig.run(1, clip())
    assert result.status == "failed"
    assert str(error) in result.detail
    assert rig.broken == []


def test_what_is_left_changed_is_said_and_training_goes_on(rig):
    rig.knob.error = PartlyChanged("out of memory; still changed: 3 in BF16 (RuntimeError: busy)")
    (result,) = rig.run(1, clip())
    assert (result.status, result.detail) == ("failed", str(rig.knob.error))
    assert rig.broken == []


def test_half_restored_state_stops_the_run(rig):
    rig.knob.error = PartlyRestored("half")
    rig.run(1, clip())
    assert rig.broken == ["tighten_clip: half"]


def test_command_decided_before_a_rollback_of_the_same_boundary_expires(rig):
    rig.knob.error = None
    original = rig.knob.apply

    def rollback(step: int, params: dict[str, Any]) -> Applied:
        rig.attempt += 1
        return original(step, params)

    rig.knob.apply = rollback  # type: ignore[method-assign]
    rig.run(1, clip(1.0, id="a", sequence=1), clip(2.0, id="b", sequence=2))
    assert rig.knob.value == 1.0
    assert next(r for r in rig.results if r.id == "b").status == "expired"


@pytest.mark.parametrize("can_truncate", [True, False])
def test_a_short_write_to_the_journal_is_no_begin(rig, monkeypatch, can_truncate):
    """A full disk takes the first bytes of a line and then no more."""
    rig.boundary.receive(command("tighten_clip", params={"to": 1.0}))
    size = len(rig.journal.path.read_bytes()) if rig.journal.path.exists() else 0
    own_write, own_truncate = os.write, os.ftruncate

    def write(descriptor: int, data: bytes) -> int:
        if len(data) < 20 or os.fstat(descriptor).st_size > size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return own_write(descriptor, data[:20])

    def truncate(descriptor: int, length: int) -> None:
        if not can_truncate:
            raise OSError(errno.EIO, "truncate")
        own_truncate(descriptor, length)

    with monkeypatch.context() as patch:
        patch.setattr("fp8watch.training.journal.os.write", write)
        patch.setattr("fp8watch.training.journal.os.ftruncate", truncate)
        rig.boundary.run(5)
    assert rig.knob.value == 0.0
    assert rig.results[-1].status == "failed"
    assert "No space left" in rig.results[-1].detail
    if can_truncate:
        assert len(rig.journal.path.read_bytes()) == size
    rig.journal.begin(command("tighten_clip", id="later", sequence=2), 6)
    assert [entry.id for entry in Journal(rig.journal.path.parent, 0).unfinished] == ["later"]


def test_a_write_in_pieces_is_completed(rig, monkeypatch):
    own_write = os.write
    monkeypatch.setattr("fp8watch.training.journal.os.write", lambda fd, data: own_write(fd, data[:7]))
    rig.journal.begin(command("tighten_clip", id="pieces"), 6)
    assert [entry.id for entry in Journal(rig.journal.path.parent, 0).unfinished] == ["pieces"]
