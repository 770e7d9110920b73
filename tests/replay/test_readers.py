"""Every reader gives the steps of its format in order, and names the row that is wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8watch import columns
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.errors import BadInput, MissingDependency
from fp8watch.records import Hello, Layout, RunRecord, StepFrame, TensorColumn
from fp8watch.replay.readers import open_path

number = st.one_of(st.floats(allow_nan=False), st.sampled_from([math.inf, -math.inf]))


def rows(path: Path) -> list[tuple[int, int, dict[str, float]]]:
    (recording,) = open_path(path)
    return [(sample.attempt, sample.step, sample.scalars) for sample in recording.samples]


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.tuples(number, st.one_of(st.none(), number)), min_size=1, max_size=20))
def test_csv_round_trip(tmp_path_factory: pytest.TempPathFactory, values: list[tuple[float, float | None]]) -> None:
    path = tmp_path_factory.mktemp("csv") / "run.csv"
    lines = [f"{10 * i},{loss!r},{'' if norm is None else repr(norm)}" for i, (loss, norm) in enumerate(values)]
    path.write_text("step,loss,grad_norm\n" + "\n".join(lines) + "\n")
    expected = [{"loss": loss} | ({} if norm is None else {"grad_norm": norm}) for loss, norm in values]
    assert rows(path) == [(0, 10 * i, scalars) for i, scalars in enumerate(expected)]


# case: SPK-12
def test_csv_knows_nan_text_other_names_and_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_text("_step,epoch,train/loss,lr\n5.0,0,nan,1e-3\n6,0,inf,\n4,0,2.5,1e-4\n")
    read = rows(path)
    assert math.isnan(read[0][2]["loss"])
    assert read[0][2]["learning_rate"] == 1e-3
    assert read[1][2] == {"loss": math.inf}
    assert read[2] == (1, 4, {"loss": 2.5, "learning_rate": 1e-4})


def test_csv_as_excel_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_bytes("\ufeffstep,loss\r\n1,2.0\r\n".encode())
    assert rows(path) == [(0, 1, {"loss": 2.0})]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("x,1.0,1", "run.csv:3: step: 'x' is not a number"),
        ("2,one,1", "run.csv:3: loss: 'one' is not a number"),
        ("2.5,1,1", "run.csv:3: step: '2.5' is no whole number from 0"),
        ("2,1", "run.csv:3: row: 2 cells, the header has 3"),
        (",1,1", "run.csv:3: step: empty"),
    ],
)
def test_csv_names_the_bad_row_after_what_came_before(tmp_path: Path, row: str, problem: str) -> None:
    path = tmp_path / "run.csv"
    path.write_text(f"step,loss,grad_norm\n1,1,1\n{row}\n3,1,1\n")
    (recording,) = open_path(path)
    assert next(recording.samples).step == 1
    with pytest.raises(BadInput) as caught:
        next(recording.samples)
    assert caught.value.problems == [str(tmp_path / problem)]


def test_csv_without_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(BadInput) as caught:
        rows(path)
    assert len(caught.value.problems) == 2


def test_trainer_state(tmp_path: Path) -> None:
    history = [
        {"step": 10, "loss": 2.5, "grad_norm": 1.5, "learning_rate": 1e-4, "epoch": 0.1},
        {"step": 10, "eval_loss": 2.4},
        {"step": 20, "loss": math.nan, "grad_norm": math.inf},
    ]
    folder = tmp_path / "my-run"
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history, "global_step": 20}))
    (recording,) = open_path(folder)
    assert (recording.run, recording.may_be_filtered) == ("my-run", True)
    samples = list(recording.samples)
    assert samples[0].scalars == {"loss": 2.5, "grad_norm": 1.5, "learning_rate": 1e-4}
    assert [s.step for s in samples] == [10, 20]
    assert math.isnan(samples[1].scalars["loss"])


def test_trainer_state_that_is_none(tmp_path: Path) -> None:
    for text, field in (("{", "json"), ("[]", "log_history"), ('{"log_history": [{"loss": 1, "step": "a"}]}', "step")):
        path = tmp_path / "trainer_state.json"
        path.write_text(text)
        with pytest.raises(BadInput, match=field):
            rows(path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"log_history": [{"step": 1, "loss": 1' + "0" * 400 + "}]}"])
def test_trainer_state_that_python_cannot_hold(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trainer_state.json"
    path.write_text(text)
    with pytest.raises(BadInput):
        rows(path)


def test_megatron(tmp_path: Path) -> None:
    line = (
        " [2026-01-01 00:00:00] iteration {:8d}/  500000 | consumed samples: 160 "
        "| elapsed time per iteration (ms): 1234.5 | learning rate: 1.500000E-04 "
        "| global batch size: 16 | lm loss: {} | loss scale: 1.0 | grad norm: 2.345 "
        "| number of skipped iterations: 0 | number of nan iterations: {} |\n"
    )
    path = tmp_path / "train.log"
    path.write_text(
        "building GPT model ...\n" + line.format(10, "1.034000E+01", 0) + "noise\n" + line.format(20, "9.0E+00", 1)
    )
    (recording,) = open_path(path)
    assert recording.source == "megatron"
    first, second = recording.samples
    assert first.scalars == {"loss": 10.34, "grad_norm": 2.345, "learning_rate": 1.5e-4, "loss_scale": 1.0}
    assert (second.step, math.isnan(second.scalars["loss"])) == (20, True)


def test_torchtitan_in_colour(tmp_path: Path) -> None:
    path = tmp_path / "titan.log"
    path.write_text(
        "[titan] 2026-01-01 - root - INFO - Training starts at step 1\n"
        "[titan] - root - INFO - \x1b[31mstep:  1  \x1b[32mloss:  8.1309  \x1b[38;2;180;60;0mgrad_norm:  1.2345  "
        "\x1b[33mmemory:  3.88GiB(4.1%)  \x1b[34mtps: 1,234\x1b[39m\n"
        "[titan] - root - INFO - step: 10  loss: nan  grad_norm: inf  memory: 1\n"
    )
    read = rows(path)
    assert read[0] == (0, 1, {"loss": 8.1309, "grad_norm": 1.2345})
    assert (read[1][1], math.isnan(read[1][2]["loss"]), read[1][2]["grad_norm"]) == (10, True, math.inf)


def test_a_store_of_our_own_with_its_tensors(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "runs" / "a" / "store.db")
    hello = Hello(
        wire_version=1, run="a", attempt=0, rank=0, local_rank=0, world_size=1, pid=1, host="h", time_unix=0.0, step=0
    )
    tensor = TensorColumn(module="m", tensor="weight", block="0", fp8_format="e4m3")
    store.append("a", [RunRecord(run="a", state="ended", hello=hello, started_unix=0.0, updated_unix=0.0)])
    store.append(
        "a", [Layout(run="a", attempt=0, rank=0, layout_id=1, columns=[tensor], expected_modules=1, observed_modules=1)]
    )
    for attempt, step in ((0, 1), (0, 2), (1, 2), (1, 3)):
        amax = columns.pack(__import__("numpy").array([float(step)]), "f4")
        store.append("a", [StepFrame(run="a", attempt=attempt, rank=0, step=step, layout_id=1, time_unix=0.0,
                                     scalars={"loss": 1.0}, columns={"amax": amax})])  # fmt: skip
    store.close()
    (recording,) = open_path(tmp_path)
    samples = list(recording.samples)
    assert [(s.attempt, s.step) for s in samples] == [(0, 1), (0, 2), (1, 2), (1, 3)]
    assert samples[-1].tensors == (tensor,)
    assert samples[-1].values["amax"].tolist() == [3.0]
    assert recording.may_be_filtered is False


def test_tensorboard_says_what_it_needs(tmp_path: Path) -> None:
    pytest.importorskip("importlib.metadata")
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        (tmp_path / "events.out.tfevents.1").write_bytes(b"")
        with pytest.raises(MissingDependency, match="tensorboard"):
            open_path(tmp_path)


@pytest.mark.parametrize("name", ["nothing.log", "absent.csv"])
def test_what_nobody_can_read_is_said(tmp_path: Path, name: str) -> None:
    (tmp_path / "nothing.log").write_text("hello\n")
    with pytest.raises(BadInput, match=name):
        open_path(tmp_path / name)
