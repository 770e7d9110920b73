"""A null or an empty cell in the place of a loss is said, in every format that can hold one; NaN is found as always."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fp8watch.cli import build
from fp8watch.detect.base import Sample
from fp8watch.replay.detected import detected
from fp8watch.replay.recording import Recording, Seen
from fp8watch.replay.run import replay

EMPTY = {41, 42, 43, 90}
"""Steps of a run of 120 that have no loss."""


def losses() -> Iterable[tuple[int, float | None]]:
    for step in range(1, 121):
        yield step, None if step in EMPTY else round(3 + 0.01 * random.Random(step).gauss(0, 1), 4)


def told(path: Path, out_format: Any = "table") -> tuple[int, str, list[str]]:
    """Exit code, stdout, and the notes without the one on filtered series."""
    out, err = io.StringIO(), io.StringIO()
    code = replay([path], out_format=out_format, out=out, err=err)
    return code, out.getvalue(), [line for line in err.getvalue().splitlines() if "may have repaired" not in line]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def jsonl(folder: Path) -> Path:
    return write(folder / "run.jsonl", "".join(json.dumps({"step": s, "loss": v}) + "\n" for s, v in losses()))


def history(folder: Path) -> Path:
    rows = [{"_step": s, "_runtime": 1.0, "train/loss": v, "lr": 0.1} for s, v in losses()]
    return write(folder / "files" / "wandb-history.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def one_list(folder: Path) -> Path:
    return write(folder / "export.json", json.dumps([{"_step": s, "loss": v, "lr": 0.1} for s, v in losses()]))


def csv(folder: Path) -> Path:
    return write(folder / "run.csv", "step,loss\n" + "".join(f"{s},{'' if v is None else v}\n" for s, v in losses()))


def csv_with_rate(folder: Path) -> Path:
    rows = "".join(f"{s},{'' if v is None else v},0.1\n" for s, v in losses())
    return write(folder / "run.tsv", ("step,train_loss,lr\n" + rows).replace(",", "\t"))


def chart(folder: Path) -> Path:
    rows = "".join(f'"{s}","{"" if v is None else v}"\n' for s, v in losses())
    return write(folder / "chart.csv", '"Step","big - train/loss"\n' + rows)


def trainer_state(folder: Path) -> Path:
    entries: list[dict[str, Any]] = [{"step": s, "loss": v, "learning_rate": 0.1} for s, v in losses()]
    entries.insert(50, {"step": 50, "eval_loss": 2.0})
    return write(folder / "trainer_state.json", json.dumps({"log_history": entries}))


def megatron(folder: Path) -> Path:
    lines = [
        f" iteration {s:8d}/     120 | learning rate: 1.0E-04 | {f'lm loss: {v:.6E} | ' if v else ''}grad norm: 1.0 |"
        for s, v in losses()
    ]
    return write(folder / "run.log", "\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("made", "line", "how"),
    [
        (jsonl, 41, "null"), (history, 41, "null"), (one_list, 1, "null"), (trainer_state, 1, "null"),
        (csv, 42, "an empty cell"), (csv_with_rate, 42, "an empty cell"), (chart, 42, "an empty cell"),
        (megatron, 41, "the line names none"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("out_format", ["table", "jsonl"])
def test_it_is_said_with_the_first_place_and_how_many(
    tmp_path: Path, made: Any, line: int, how: str, out_format: str
) -> None:
    path = made(tmp_path / "run")
    code, _, (note, *others) = told(path, out_format)
    assert (code, others) == (0, [])
    assert note.startswith(f"note: {path}:{line}:")
    assert f"loss: 4 steps have no loss ({how})" in note


@pytest.mark.parametrize("made", [jsonl, csv])
def test_what_is_said_does_not_wait_for_the_end_of_a_log_that_breaks_off(tmp_path: Path, made: Any) -> None:
    path = made(tmp_path)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:60]) + "x\n")
    code, _, err = told(path)
    assert code == 2
    assert "3 steps have no loss" in err[0]


def test_a_step_whose_loss_stands_in_another_row_has_one(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for step in range(1, 60):
        rows += [{"_step": step, "loss": None, "lr": 0.1}, {"_step": step, "loss": 3.0, "lr": None}]
    path = write(tmp_path / "run.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert told(path)[2] == []
    path = write(tmp_path / "run.csv", "step,loss,lr\n" + "".join(f"{s},,0.1\n{s},3.0,\n" for s in range(1, 60)))
    assert told(path)[2] == []


def test_rows_of_evaluations_have_none_by_right(tmp_path: Path) -> None:
    """As pandas writes a history down: every row has every column."""
    rows: list[dict[str, Any]] = [{"_step": s, "loss": 3.0, "val/loss": None} for s in range(1, 60)]
    rows[30:30] = [{"_step": 300, "loss": None, "val/loss": 2.5}]
    path = write(tmp_path / "run.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert told(path)[2] == []
    lines = [f"{s},3.0,\n" + (f"{s}5,,2.5\n" if s % 10 == 0 else "") for s in range(1, 60)]
    assert told(write(tmp_path / "run.csv", "step,loss,val_loss\n" + "".join(lines)))[2] == []


def test_a_log_with_scores_in_the_rows_of_training_hides_nothing_behind_them(tmp_path: Path) -> None:
    rows = [{"step": s, "loss": None if s in EMPTY else 3.0, "val_loss": 2.5} for s in range(1, 121)]
    path = write(tmp_path / "run.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert "4 steps have no loss (null)" in told(path)[2][0]
    text = "step,loss,val_loss\n" + "".join(f"{s},{'' if s in EMPTY else 3.0},2.5\n" for s in range(1, 121))
    assert "4 steps have no loss (an empty cell)" in told(write(tmp_path / "run.csv", text))[2][0]


def test_a_null_under_a_name_that_is_not_read_says_nothing(tmp_path: Path) -> None:
    rows = [{"step": s, "train/loss": 3.0, "loss": None} for s in range(1, 60)]
    path = write(tmp_path / "run.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert told(path)[2] == []


def test_of_several_runs_in_a_chart_it_is_said_what_an_empty_cell_may_be(tmp_path: Path) -> None:
    rows = "".join(f"{s},3.0,{'' if s > 80 else 2.0}\n" for s in range(1, 121))
    (note,) = told(write(tmp_path / "chart.csv", '"Step","a - loss","b - loss"\n' + rows))[2]
    assert "40 steps have no loss" in note
    assert "run b ended, logged other steps than the others, or had a NaN there" in note


def test_one_step_and_none(tmp_path: Path) -> None:
    path = write(tmp_path / "run.csv", "step,loss\n1,3.0\n2,\n3,3.0\n")
    assert "loss: 1 step has no loss (an empty cell):" in told(path)[2][0]
    assert told(write(path, "step,loss\n1,3.0\n2,3.0\n"))[2] == []


def test_nan_is_found_and_is_no_missing_loss(tmp_path: Path) -> None:
    rows = "".join(f'{{"step": {s}, "loss": {"NaN" if s == 60 else v or 3.0}}}\n' for s, v in losses())
    code, out, err = told(write(tmp_path / "run.jsonl", rows), "jsonl")
    assert (code, err) == (0, [])
    assert json.loads(out.splitlines()[0])["detector"] == "nonfinite"
    assert json.loads(out.splitlines()[0])["step"] == 60


def test_a_policy_comparison_says_it_too(tmp_path: Path) -> None:
    result = CliRunner().invoke(build(), ["policy", "compare", "auto", "observe", str(jsonl(tmp_path))])
    assert result.exit_code == 0
    assert "4 steps have no loss (null)" in result.stderr


def test_of_a_run_of_our_own_it_was_not_observed() -> None:
    def steps() -> Any:
        for step in range(1, 10):
            scalars = {} if step in (4, 5) else {"loss": 3.0}
            yield Seen(sample=Sample(attempt=0, step=step, scalars=scalars), findings=[], troubles=lambda: ())

    recording = Recording(run="r", source="fp8watch", samples=iter(()), may_be_filtered=False, steps=steps)
    assert len(list(detected(recording))) == 9
    assert recording.notes == ["r: 2 steps have no loss (not observed), from step 4 on"]
