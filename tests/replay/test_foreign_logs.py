"""Logs as other tools write them: TensorBoard's own writer, W&B's exports, Lightning, NeMo; found alike in all."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8watch.errors import BadInput
from fp8watch.replay.readers import open_path
from fp8watch.replay.run import replay

RNG = np.random.default_rng(3)
LOSS = [float(np.float32(x)) for x in 3.0 * (1 + 0.01 * RNG.standard_normal(160))]
LOSS[100:130] = [x * 2 for x in LOSS[100:130]]
LOSS[150] = math.nan
ROWS = [(step + 1, loss, 0.5, 1e-3) for step, loss in enumerate(LOSS)]


def samples(path: Path) -> list[tuple[int, int, dict[str, float]]]:
    (recording,) = open_path(path)
    return [(sample.attempt, sample.step, sample.scalars) for sample in recording.samples]


def expected(rows: list[tuple[int, float, float, float]] = ROWS) -> str:
    return repr(
        [(0, step, {"loss": loss, "grad_norm": norm, "learning_rate": rate}) for step, loss, norm, rate in rows]
    )


def ordered(read: list[tuple[int, int, dict[str, float]]]) -> str:
    keys = ("loss", "grad_norm", "learning_rate")
    rounded = [{key: values[key] if key == "loss" else round(values[key], 6) for key in keys} for _, _, values in read]
    return repr([(attempt, step, values) for (attempt, step, _), values in zip(read, rounded, strict=True)])


def found(path: Path) -> list[tuple[int, str, str]]:
    out = io.StringIO()
    assert replay([path], out=out, err=io.StringIO()) == 0
    return [(x["step"], x["detector"], x["severity"]) for x in map(json.loads, out.getvalue().splitlines())]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "plain.csv"
    path.write_text("step,loss,grad_norm,lr\n" + "".join(f"{s},{x!r},{n},{r}\n" for s, x, n, r in ROWS))
    return path


# TensorBoard, written by its own package


def events(folder: Path, rows: list[tuple[int, float, float, float]], tags: tuple[str, ...], suffix: str = "") -> Path:
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder), filename_suffix=suffix)
    for step, *values in rows:
        for tag, value in zip(tags, values, strict=True):
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(step=step, wall_time=float(step), summary=summary))
    writer.close()
    return folder


@pytest.mark.parametrize(
    "tags",
    [
        ("train/loss", "train/grad_norm", "train/learning_rate"),  # Transformers
        ("lm loss", "grad-norm", "learning-rate"),  # Megatron
        ("loss_metrics/global_avg_loss", "grad_norm", "lr"),  # torchtitan
        ("reduced_train_loss", "grad_norm", "lr"),  # NeMo
    ],
)
def test_tensorboard_as_its_own_writer_writes_it(tmp_path: Path, plain: Path, tags: tuple[str, str, str]) -> None:
    folder = events(tmp_path / "run", ROWS, tags)
    assert ordered(samples(folder)) == expected()
    assert found(folder) == found(plain)
    assert [step for step, _, _ in found(folder)][:2] == [101, 103]


def test_torchs_summary_writer(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "run")) as writer:
        for step, loss, norm, rate in ROWS:
            writer.add_scalar("train/loss", loss, step)
            writer.add_scalar("train/grad_norm", norm, step)
            writer.add_scalar("lr", rate, step)
        writer.add_histogram("weights", np.arange(4.0), 1)
    assert ordered(samples(tmp_path / "run")) == expected()


def test_tensorboard_a_restart_is_another_attempt_and_a_cut_off_file_ends_early(tmp_path: Path) -> None:
    tags = ("loss", "grad_norm", "lr")
    folder = events(tmp_path / "run", ROWS[:60], tags, ".1")
    events(folder, ROWS[39:80], tags, ".2")
    files = sorted(folder.glob("*tfevents*"), key=lambda path: path.name[-1])
    for number, file in enumerate(files):  # both were made in the same second
        file.rename(folder / f"events.out.tfevents.{1000 + number}.h")
    read = samples(folder)
    assert [(a, s) for a, s, _ in read] == [(0, s) for s in range(1, 61)] + [(1, s) for s in range(40, 81)]
    last = folder / "events.out.tfevents.1001.h"
    last.write_bytes(last.read_bytes()[:-20])
    assert len(samples(folder)) == len(read), "of the last step the last scalar is gone, the step is not"


def test_tensorboard_without_a_loss_and_damaged(tmp_path: Path) -> None:
    folder = events(tmp_path / "run", ROWS[:3], ("a", "b", "c"))
    with pytest.raises(BadInput, match="there are: a, b, c"):
        samples(folder)
    (tmp_path / "events.out.tfevents.1").write_bytes(b"no events " * 50)
    with pytest.raises(BadInput, match=":1:"):
        samples(tmp_path / "events.out.tfevents.1")


# Weights & Biases


def history() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for step, loss, norm, rate in ROWS:
        rows.append({"_step": step, "_runtime": step * 0.5, "train/loss": "NaN" if math.isnan(loss) else loss})
        rows.append({"_step": step, "train/grad_norm": norm, "train/learning_rate": rate, "train/global_step": step})
        rows.append({"_step": step, "system.gpu.0.temp": 50})
    return rows


def test_wandb_history_as_lines_and_as_one_list(tmp_path: Path, plain: Path) -> None:
    lines = tmp_path / "run-7" / "files" / "wandb-history.jsonl"
    lines.parent.mkdir(parents=True)
    lines.write_text("\n".join(json.dumps(row) for row in history()) + "\n")
    (recording,) = open_path(tmp_path / "run-7")
    assert recording.run == "run-7"
    assert ordered(samples(lines)) == expected()
    assert found(lines) == found(plain)
    whole = tmp_path / "export.json"
    whole.write_text(json.dumps(history()))
    assert ordered(samples(whole)) == expected()


def test_wandb_a_charts_export_has_a_column_a_run(tmp_path: Path) -> None:
    path = tmp_path / "chart.csv"
    with path.open("w", newline="") as handle:
        writer = csv.writer(handle, quoting=csv.QUOTE_ALL)
        ends = ("", "__MIN", "__MAX")
        writer.writerow(["Step", *(f"{run} - train/loss{end}" for run in ("big - 1", "b") for end in ends)])
        writer.writerow([1, 2.0, 2.0, 2.0, 5.0, 5.0, 5.0])
        writer.writerow([2, 2.1, 2.1, 2.1, "", "", ""])
    runs = {recording.run: [(s.step, s.scalars) for s in recording.samples] for recording in open_path(path)}
    assert runs == {"big - 1": [(1, {"loss": 2.0}), (2, {"loss": 2.1})], "b": [(1, {"loss": 5.0})]}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"_step": 1, "loss": 1.0}\n{"_step": 2, "loss": "x"}\n', r":2: loss: 'x' is not a number"),
        ('{"_step": 1, "loss": 1.0}\n{"loss": 1.0}\n', r":2: step: missing"),
        ('{"_step": 1, "loss": 1.0}\n[]\n', r":2: row: an object is wanted"),
        ('{"_step": 1, "loss": 1.0}\n{"_step": 2,\n', r":2: json"),
        ('{"_step": 1.5, "loss": 1.0}\n', r":1: _step: 1.5 is no whole number"),
        ('{"_step": 1, "accuracy": 1.0}\n', r":1: loss: no row has one; there are: _step, accuracy"),
        ('{"_step": true, "loss": 1.0}\n', r":1: _step: True is not a number"),
    ],
)
def test_wandb_bad_rows_are_named(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "h.jsonl"
    path.write_text(text)
    with pytest.raises(BadInput, match=problem):
        samples(path)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=30), st.dictionaries(st.sampled_from(["_step", "loss", "x"]), st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=2)
)).map(json.dumps)), max_size=6))  # fmt: skip
def test_any_lines_are_read_or_named(tmp_path_factory: pytest.TempPathFactory, rows: list[str]) -> None:
    path = tmp_path_factory.mktemp("rows") / "h.jsonl"
    path.write_text("\n".join(rows))
    out, err = io.StringIO(), io.StringIO()
    code = replay([path], out=out, err=err)
    said = [line for line in err.getvalue().splitlines() if not line.startswith("note: ")]
    assert code == (2 if said else 0)
    assert all(line.startswith(f"{path}:") for line in said)


# Lightning and NeMo


def test_lightnings_csv_logger(tmp_path: Path, plain: Path) -> None:
    folder = tmp_path / "version_0"
    folder.mkdir()
    lines = ["epoch,grad_norm,lr-AdamW,step,train_loss_epoch,train_loss_step,val_loss"]
    for step, loss, norm, rate in ROWS:  # one row a call of log, validation rows between
        lines += [f",,{rate},{step},,,", f"0,{norm},,{step},,{loss!r},"]
        if step % 40 == 0:
            lines.append(f"0,,,{step},,,2.5")
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    assert ordered(samples(folder)) == expected()
    assert found(folder) == found(plain)


def test_nemos_progress_lines(tmp_path: Path, plain: Path) -> None:
    path = tmp_path / "nemo.log"
    text = "[NeMo I 2026-01-01 00:00:00 nemo_logging:393] Setting up optimizers\n"
    for step, loss, norm, rate in ROWS:
        text += (
            f"Training epoch 0, iteration {step}/160 | lr: {rate} | global_batch_size: 16 | global_step: {step} |"
            f" reduced_train_loss: {loss!r} | grad_norm: {norm} | train_step_timing in s: 0.42\n"
        )
    path.write_text(text)
    (recording,) = open_path(path)
    assert recording.source == "nemo"
    assert ordered(samples(path)) == expected()
    assert found(path) == found(plain)


def test_of_a_row_that_repeats_a_step_the_last_value_counts(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_text("step,loss,lr\n1,2.0,\n1,,0.1\n2,2.0,0.1\n2,2.5,0.1\n")
    assert samples(path) == [
        (0, 1, {"loss": 2.0, "learning_rate": 0.1}),
        (0, 2, {"loss": 2.5, "learning_rate": 0.1}),
    ]
