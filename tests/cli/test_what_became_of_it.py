"""Actions in plain words: one that was never done has no read-back and no effect; and nothing is cut off."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from fp8watch import action_words, run_words
from fp8watch.cli import build
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.demo.plan import make_plan
from fp8watch.demo.processes import Losses
from fp8watch.demo.runner import Progress
from fp8watch.demo.screen import render
from fp8watch.demo.story import Story
from fp8watch.records import ActionRecord, CommandResult, Finding, Hello, RunRecord, TraceEntry

OVER = "16 of 16 modules would be in BF16, over max_share 0.5"
WHY = f"{OVER} (next in turn because repair_scale had no effect)"


def action(number: int, name: str, **fields: Any) -> ActionRecord:
    given: dict[str, Any] = {
        "id": f"r-1.000{number}", "run": "r", "attempt": 0, "action": name, "params": {}, "rule": "scales",
        "finding": "f1", "incident": "i1", "mode": "auto", "decided_step": 40 + number,
    }  # fmt: skip
    return ActionRecord(**(given | fields))


LADDER = [
    action(1, "repair_scale", params={"tensors": ["a", "b"]}, status="applied", applied_step=42, readback="ok",
           outcome="no_effect", reason="still there at the end of the settling window"),
    action(2, "bf16_layers", status="unavailable", reason=WHY),
    action(3, "bf16_all", status="applied", applied_step=54, readback="ok", outcome="helped"),
    action(4, "rollback", status="refused", reason="budget spent: 2 of 2 rollbacks in 24 hours"),
]  # fmt: skip
FINDING = Finding(
    id="f1", run="r", attempt=0, step=41, onset_step=40, detector="scale_frozen", severity="act", cause="bookkeeping",
    tensor="blocks.3.mlp.down:grad_output", layer="blocks.3.mlp.down", layers=["blocks.3.mlp.down", "blocks.2.mlp.up"],
    incident="i1", evidence={"for": ["scales differ by 2^6.6"], "against": [], "other_causes": {}},
)  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "state", "read_back", "effect"),
    [
        ({"status": "proposed"}, "only proposed", "", ""),
        ({"status": "waiting", "expires_step": 90}, "waiting until step 90", "", ""),
        ({"status": "refused"}, "not allowed", "", ""),
        ({"status": "refused", "answered_by": "mara"}, "refused by mara", "", ""),
        ({"status": "sent"}, "ordered", "", ""),
        ({"status": "unavailable"}, "passed over", "", ""),
        ({"status": "expired", "answered_by": "mara"}, "too late", "", ""),
        ({"status": "applied", "applied_step": 1}, "done", "not yet", "being judged"),
        ({"status": "applied", "applied_step": 1, "settle_until": 30}, "done", "not yet", "judged at step 30"),
        ({"status": "applied", "applied_step": 1, "readback": "failed"}, "done, but not in force", "failed",
         "being judged"),
        ({"status": "applied", "applied_step": 1, "readback": "ok", "outcome": "helped", "answered_by": "mara"},
         "done, approved by mara", "ok", "helped"),
        ({"status": "reverted", "applied_step": 1, "readback": "ok", "outcome": "no_effect"}, "done and undone", "ok",
         "no effect"),
    ],
)  # fmt: skip
def test_every_state_reads_as_what_it_is(fields: dict[str, Any], state: str, read_back: str, effect: str) -> None:
    made = action(1, "hold_lr", **fields)
    assert (action_words.state(made), action_words.read_back(made), action_words.effect(made)) == (
        state, read_back, effect,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({}, "rollback"),
        ({"checkpoint": "s-120", "changes": [], "skip_batches": 5}, "rollback (checkpoint s-120, skip_batches 5)"),
        ({"changes": [{"action": "hold_lr", "params": {"factor": 0.5}}]}, "rollback (changes hold_lr)"),
        ({"layers": ["a"], "factor": 0.123456}, "rollback (a, factor 0.1235)"),
        ({"layers": ["a", "b"]}, "rollback (2 layers)"),
    ],
)
def test_parameters_are_said_in_words(params: dict[str, Any], words: str) -> None:
    assert action_words.named("rollback", params) == words


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for number, run in enumerate(("r", "newer")):
        hello = Hello(
            wire_version=1, run=run, attempt=0, rank=0, local_rank=0, world_size=1, pid=1, host="h", time_unix=1.0,
            step=0,
        )  # fmt: skip
        record = RunRecord(run=run, state="ended", hello=hello, started_unix=float(number), updated_unix=2.0,
                           reason="end")  # fmt: skip
        passed = {"run": "r", "attempt": 0, "time_unix": 0.0, "incident": "i1", "event": "passed_over"}
        trace = [
            TraceEntry(**passed, step=42, action="bf16_layers", reason=WHY, details={"status": "unavailable"}),
            TraceEntry(**passed, step=44, action="rollback", reason=LADDER[3].reason, details={"status": "refused"}),
        ]
        answers = [
            CommandResult(id="r-1.0001", run="r", attempt=0, rank=0, verb="apply", step=42, status="applied",
                          readback=readback)
            for readback in ("pending", "ok")
        ]  # fmt: skip
        with contextlib.closing(SqliteStore(tmp_path / "runs" / run / "store.sqlite")) as store:
            store.append(run, [record, *([FINDING, *LADDER, *trace, *answers] if run == "r" else [])])
    return tmp_path


def call(home: Path, *arguments: str) -> Result:
    return CliRunner().invoke(build(), [*arguments, "--dir", str(home)])


def test_listings_say_nothing_of_what_was_never_done(home: Path) -> None:
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in call(home, "actions", "list", "r").stdout.splitlines()
    ]
    of = {row[1]: row for row in rows if len(row) == 9}
    assert of["bf16_layers"][3:8] == ["-", "auto", "passed over", "-", "-"]
    assert of["bf16_layers"][8] == WHY
    assert of["rollback"][5:8] == ["not allowed", "-", "-"]
    assert of["repair_scale"][5:8] == ["done", "ok", "no effect"]
    listed = call(home, "incident", "list", "r").stdout
    assert (
        "repair_scale done, no effect; bf16_layers passed over; bf16_all done, helped; rollback not allowed" in listed
    )
    raw = json.loads(call(home, "actions", "list", "r", "--json").stdout)
    assert [item["status"] for item in raw] == ["applied", "unavailable", "applied", "refused"], "programs read these"


def test_a_run_is_summed_up_in_the_same_words(home: Path) -> None:
    shown = call(home, "runs", "show", "r").stdout
    state, actions = (
        next(line for line in shown.splitlines() if f"│ {name} " in line) for name in ("state", "actions")
    )
    assert state.split("│")[2].strip() == "ended", "that it ended at its end is said once"
    assert "1 x repair_scale done, no effect; 1 x bf16_layers passed over; 1 x bf16_all done, helped" in actions
    assert "1 x rollback not allowed" in actions
    assert "end" not in [cell.strip() for cell in call(home, "runs", "list").stdout.split("│")]


def test_a_halt_says_why() -> None:
    hello = Hello(
        wire_version=1, run="r", attempt=0, rank=0, local_rank=0, world_size=1, pid=1, host="h", time_unix=1.0, step=0,
    )  # fmt: skip
    halted = RunRecord(run="r", state="halted", hello=hello, started_unix=0.0, updated_unix=0.0, reason="budget spent")
    assert run_words.state(halted) == "halted: budget spent"


def test_a_story_says_each_thing_once(home: Path) -> None:
    text = call(home, "incident", "show", "i1", "--run", "r").stdout
    assert f"step 42 (attempt 0) passed over: bf16_layers; {WHY}\n" in text
    assert "step 44 (attempt 0) not allowed: rollback; budget spent: 2 of 2 rollbacks in 24 hours\n" in text
    assert "r-1.0002: bf16_layers: passed over\n" in text
    assert "r-1.0001: repair_scale (tensors [a, b]): done, read back ok, no effect\n" in text
    assert text.count("rank 0, step 42: apply applied") == 1, (
        "the answer that it was applied, and that it was read back"
    )
    assert "speaks for it: scales differ by 2^6.6" in text
    assert "speaks against it: nothing" in text
    assert "other_causes" not in text
    assert "pending" not in text


def test_an_incident_of_an_older_run_is_found_and_that_is_said(home: Path) -> None:
    found = call(home, "incident", "show", "r-1.0003")
    assert found.exit_code == 0
    assert "of run r, which is not the newest" in found.stderr
    assert call(home, "incident", "show", "r-1.0003", "--run", "newer").exit_code == 3
    missing = call(home, "incident", "show", "i9")
    assert missing.exit_code == 3
    assert "in any run; `fp8watch incident list` names them" in missing.stderr


@pytest.mark.parametrize("width", [80, 118])
def test_the_demos_screen_has_its_title_and_its_lines_whole(width: int) -> None:
    plan = make_plan(
        scenario="frozen-scale", policy="auto", steps=None, seed=0, fault_step=None, layer=None, device="cpu"
    )  # fmt: skip
    losses = Losses()
    for step in range(1, 101):
        losses.add(step, 3.0)
    waiting = action(5, "hold_lr", status="waiting", expires_step=90)
    story = Story(findings=[FINDING], actions=[*LADDER[:3], waiting])
    console = Console(record=True, width=width, force_terminal=True, file=io.StringIO())
    console.print(render(Progress(plan=plan, watched=losses, twin=losses, unwatched=None, story=story), width=width))
    lines = console.export_text().splitlines()
    assert "fp8watch demo: frozen-scale, step 100 of 400 " in lines[0]
    assert plan.scenario.summary in lines[1]
    found = next(line for line in lines if "found" in line)
    assert "scale_frozen (act), cause bookkeeping, since step 40" in found
    assert any("not     step 42: bf16_layers passed over: 16 of 16 modules" in line for line in lines)
    assert any("asks    step 45: hold_lr waiting until step 90" in line for line in lines)
    assert not any("pending" in line for line in lines)
