"""Logs in which steps stand twice, or mostly do not grow."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from fp8watch.errors import BadInput
from fp8watch.replay.readers import csv_log
from fp8watch.replay.run import replay

STEPS = {
    "reversed": list(range(30))[::-1],
    "equal": [7] * 30,
}


def csv(path: Path, steps: list[int]) -> Path:
    path.write_text("step,loss\n" + "".join(f"{step},{2.0 + row}\n" for row, step in enumerate(steps)))
    return path


@pytest.mark.parametrize(("kind", "line"), [("reversed", 3), ("equal", 3)])
def test_steps_that_do_not_grow_are_refused(tmp_path: Path, kind: str, line: int) -> None:
    path = csv(tmp_path / "run.csv", STEPS[kind])
    with pytest.raises(BadInput, match="mostly do not grow") as caught:
        list(csv_log.read(path).samples)
    assert caught.value.problems[0].startswith(f"{path}:{line}: step: ")


def test_rows_that_stand_twice_are_one_and_the_last_counts(tmp_path: Path) -> None:
    path = csv(tmp_path / "run.csv", [step for step in range(20) for _ in (0, 1)])
    found = list(csv_log.read(path).samples)
    assert [(s.attempt, s.step) for s in found] == [(0, step) for step in range(20)]
    assert [s.scalars["loss"] for s in found] == [2.0 + 2 * step + 1 for step in range(20)]


def test_a_rollback_is_still_a_new_attempt(tmp_path: Path) -> None:
    path = csv(tmp_path / "run.csv", [*range(10), *range(5, 15), *range(12, 20)])
    assert [s.attempt for s in csv_log.read(path).samples] == [0] * 10 + [1] * 10 + [2] * 8


def test_a_loss_that_is_no_number_is_not_taken_back_by_a_row_of_the_same_step(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    rows = [f"{step},2.0" for step in range(1, 60)]
    path.write_text("\n".join(["step,loss", *rows, "60,nan", "60,2.0", "61,2.0", ""]))
    out = io.StringIO()
    assert replay([path], out=out, err=io.StringIO()) == 0
    assert [json.loads(line)["detector"] for line in out.getvalue().splitlines()] == ["nonfinite"]
