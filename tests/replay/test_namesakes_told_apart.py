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
    lines.action(
        {"run": "r", "step": 3, "severity": "proposal", "kind": "apply", "action": "checkpoint_now", "params": {},
         "rule": "risk", "reason": reason}
    )  # fmt: skip
    lines.close(Tally())
    (row,) = [line for line in out.getvalue().splitlines() if "checkpoint_now" in line]
    assert row.rstrip(" │").endswith(ending)
