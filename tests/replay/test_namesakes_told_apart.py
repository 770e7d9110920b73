"""Runs of one name from several files are told apart; and what has no reason has no colon."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fp8watch.cli import build
from fp8watch.replay.namesakes import told_apart
from fp8watch.replay.printing import Tally, printer
from fp8watch.replay.recording import Recording

PART = st.sampled_from(["a", "b", "runs", "r.csv", "r.jsonl", "store.sqlite"])
PATHS = st.lists(PART, min_size=1, max_size=4).map(lambda parts: "/" + "/".join(parts))


def compared(*paths: Path) -> list[str]:
    result = CliRunner().invoke(build(), ["policy", "compare", "auto", "observe", *map(str, paths), "--json"])
    assert result.exit_code == 0, result.output
    return [run["run"] for run in json.loads(result.stdout)["runs"]]


def logs(folder: Path) -> tuple[Path, Path]:
    folder.mkdir(exist_ok=True)
    table, lines = folder / "r.csv", folder / "r.jsonl"
    table.write_text("step,loss\n" + "".join(f"{step},2.5\n" for step in range(1, 31)))
    lines.write_text("".join(json.dumps({"_step": step, "loss": 2.5}) + "\n" for step in range(1, 31)))
    return table, lines


def test_a_comparison_names_files_whose_runs_share_a_name(tmp_path: Path) -> None:
    table, lines = logs(tmp_path)
    assert compared(table, lines) == ["r.csv", "r.jsonl"]
    assert compared(table) == ["r"]
    other, _ = logs(tmp_path / "other")
    assert compared(table, other) == [f"{tmp_path.name}/r.csv", "other/r.csv"]
    shown = CliRunner().invoke(build(), ["policy", "compare", "auto", "observe", str(table), str(lines)]).stdout
    assert "r.jsonl" in shown


def test_a_folder_is_named_by_its_own_file(tmp_path: Path) -> None:
    folders = [tmp_path / name / "version_0" for name in ("one", "two")]
    for folder in folders:
        folder.mkdir(parents=True)
        logs(folder)[0].rename(folder / "metrics.csv")
    assert compared(*folders) == [f"version_0 ({name}/version_0/metrics.csv)" for name in ("one", "two")]


def test_a_store_is_named_beside_the_run_in_it() -> None:
    assert told_apart([("x", "/one/store.sqlite"), ("x", "/two/store.sqlite"), ("y", "/two/store.sqlite")]) == [
        "x (one/store.sqlite)", "x (two/store.sqlite)", "y",
    ]  # fmt: skip
    assert told_apart([("x", "/a/x.csv"), ("x", "/a/x.csv")]) == ["x", "x"], "the same place twice is the same run"


def spiked(path: Path, at: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = (99.0 if step == at else 2.5 + 0.01 * (step % 3) for step in range(1, 101))
    path.write_text("step,loss\n" + "".join(f"{step},{value}\n" for step, value in enumerate(values, 1)))
    return path


def replayed(*arguments: str) -> tuple[str, str]:
    result = CliRunner().invoke(build(), ["replay", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def test_replay_names_files_whose_runs_share_a_name(tmp_path: Path) -> None:
    early, late = spiked(tmp_path / "a" / "run.csv", 50), spiked(tmp_path / "b" / "run.csv", 90)
    quiet = spiked(tmp_path / "c" / "run.csv", 1000)
    table, notes = replayed(str(early), str(late), str(quiet), "--policy", "auto")
    (first,), (second,) = (
        [row for row in table.splitlines() if f" {step} " in row and "warn" in row] for step in (50, 90)
    )
    assert "a/run.csv" in first
    assert "b/run.csv" in second
    costs = table[table.index("What the policy would have done") :]
    assert [name for name in ("a/run.csv", "b/run.csv", "c/run.csv") if name in costs] == [
        "a/run.csv", "b/run.csv", "c/run.csv",
    ]  # fmt: skip
    assert all(f"run ({path})" in notes for path in (early, late, quiet))
    rows = [json.loads(line) for line in replayed(str(early), str(late), "--format", "jsonl")[0].splitlines()]
    assert {(row["run"], row["step"], row["path"]) for row in rows} >= {("run", 50, str(early)), ("run", 90, str(late))}


def test_one_run_keeps_its_short_name_and_a_namesake_without_a_finding_counts(tmp_path: Path) -> None:
    found, quiet = spiked(tmp_path / "a" / "run.csv", 50), spiked(tmp_path / "b" / "run.csv", 1000)
    assert "run.csv" not in replayed(str(found))[0]
    assert "run.csv" not in replayed(str(found), str(found))[0]
    assert "a/run.csv" in replayed(str(found), str(quiet))[0]


@given(st.lists(st.tuples(st.sampled_from(["r", "x"]), PATHS), max_size=6))
def test_two_places_of_one_name_never_read_alike(runs: list[tuple[str, str]]) -> None:
    names = told_apart(runs)
    for first, name in zip(runs, names, strict=True):
        for second, other in zip(runs, names, strict=True):
            if first[0] == second[0] and first[1] != second[1]:
                assert name != other


@pytest.mark.parametrize(("reason", "ending"), [("", "rule risk"), ("nothing to go back to", "to go back to")])
def test_a_line_without_a_reason_ends_with_its_rule(reason: str, ending: str) -> None:
    out = io.StringIO()
    lines = printer("table", out)
    lines.begin(Recording(run="r", source="csv", samples=iter(())))
    lines.action(
        {"run": "r", "step": 3, "severity": "proposal", "kind": "apply", "action": "checkpoint_now", "params": {},
         "rule": "risk", "reason": reason}
    )  # fmt: skip
    lines.close(Tally())
    (row,) = [line for line in out.getvalue().splitlines() if "checkpoint_now" in line]
    assert row.rstrip(" │").endswith(ending)
