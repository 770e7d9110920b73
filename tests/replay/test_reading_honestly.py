"""What replay says of logs that it could not read, or read one of two ways; and that no file gets a traceback."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fp8watch.cli import build
from fp8watch.errors import BadInput, OutputFailed
from fp8watch.replay import bundle
from fp8watch.replay.lines import SHOWN
from fp8watch.replay.readers import open_path
from fp8watch.replay.run import replay

ROWS = "".join(f"{step},{3 + 0.01 * random.Random(step).gauss(0, 1):.4f}\n" for step in range(1, 121))
CSV = "step,loss\n" + ROWS


def told(path: Path, out_format: str = "table") -> tuple[int, str, list[str]]:
    """Exit code, stdout, and stderr without the remark on filtered series."""
    out, err = io.StringIO(), io.StringIO()
    code = replay([path], out_format=out_format, out=out, err=err)  # type: ignore[arg-type]
    return code, out.getvalue(), [line for line in err.getvalue().splitlines() if "may have repaired" not in line]


def samples(path: Path) -> list[tuple[int, dict[str, float]]]:
    (recording,) = open_path(path)
    return [(sample.step, sample.scalars) for sample in recording.samples]


# What is said at the end


def test_that_nothing_was_found_is_said_of_what_was_read_and_of_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_text(CSV)
    assert told(path) == (0, "120 steps of 1 run: no findings\n", [])
    code, out, err = told(tmp_path / "none.csv")
    assert (code, out) == (2, "nothing was read: see the errors\n")
    assert err == [f"{tmp_path / 'none.csv'}:1: path: no such file or folder"]
    path.write_text(CSV + "121,oops\n122,3\n")
    code, out, err = told(path)
    assert (code, out) == (2, "120 steps of 1 run could be read: nothing found in them; for the rest see the errors\n")
    assert "no findings" not in out
    path.write_text(CSV + "121,nan\n122,oops\n")
    assert "1 act in them; for the rest see the errors" in told(path)[1]


def test_a_log_without_steps_is_said_to_have_none(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_text("step,loss\n")
    assert told(path) == (0, "nothing was read\n", [f"note: run ({path}): there are no steps in it"])
    assert told(path, "jsonl")[1] == ""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.csv", "step,loss,lr\n" + "".join(f"{step},,0.1\n" for step in range(30))),
        ("run.jsonl", "".join(f'{{"step": {step}, "lr": 0.1}}\n' for step in range(30))),
        ("run.log", "".join(f" iteration {step:8d}/ 100 | learning rate: 1.0E-04 |\n" for step in range(1, 30))),
    ],
)
def test_a_log_whose_rows_have_no_loss_is_refused(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    code, _, err = told(path)
    assert code == 2
    assert err[0].startswith(f"{path}:1: loss: no row has one")


# Which of several columns


def test_of_two_loss_columns_one_is_read_and_that_is_said(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_text("step,train/loss,loss,grad_norm\n" + "".join(f"{step},9,3,1\n" for step in range(1, 30)))
    code, _, err = told(path)
    assert code == 0
    assert err == [f"note: {path}:1: loss: loss (column 3) is read; ignored: train/loss (column 2)"]
    assert samples(path)[0] == (1, {"loss": 3.0, "grad_norm": 1.0})
    path.write_text("step,loss,loss\n" + "1,2,3\n" * 5)
    assert told(path)[2] == [f"note: {path}:1: loss: loss (column 2) is read; ignored: loss (column 3)"]
    path.write_text("step,loss,lr,learning_rate\n1,2,3,4\n")
    assert told(path)[2] == [], "which rate is read decides nothing"


def test_rows_of_json_keep_to_the_name_that_came_first(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    rows: list[dict[str, Any]] = [{"_step": step, "train/loss": 3.0, "loss": 9.0} for step in range(1, 30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = told(path)
    assert (code, err) == (0, [f"note: {path}:1: loss: train/loss is read; ignored: loss"])
    assert {scalars["loss"] for _, scalars in samples(path)} == {3.0}


def test_tensorboard_two_loss_tags_are_no_restart(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "run")) as writer:
        for step in range(1, 40):
            writer.add_scalar("train/loss", 3.0, step)
            writer.add_scalar("loss", 9.0, step)
    (recording,) = open_path(tmp_path / "run")
    assert [(s.attempt, s.step, s.scalars) for s in recording.samples] == [
        (0, step, {"loss": 3.0}) for step in range(1, 40)
    ]
    assert [note.partition(": ")[2] for note in recording.notes] == ["loss: train/loss is read; ignored: loss"]


# Logs whose steps mostly fall


def test_a_history_of_trainer_whose_steps_fall_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    history = [{"step": step, "loss": 3.0} for step in range(100, 0, -1)]
    path.write_text(json.dumps({"log_history": history}))
    code, _, err = told(path)
    assert code == 2
    assert err[0].startswith(f"{path}:1: log_history[1]: step: 99 after 100; steps mostly do not grow")
    path.write_text(json.dumps({"log_history": [*history[::-1], *history[:50:-1]]}))
    assert told(path)[0] == 0, "a restart is what logs of real runs have"


def test_event_files_whose_steps_fall_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "run")) as writer:
        for step in range(100, 0, -1):
            writer.add_scalar("loss", 3.0, step)
    code, _, err = told(tmp_path / "run")
    assert code == 2
    assert "step: 99 after 100; steps mostly do not grow" in err[0]


def test_a_history_that_says_a_step_twice_is_one_row(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    path.write_text(
        json.dumps({"log_history": [{"step": 1, "loss": 1}, {"step": 1, "loss": 2.5}, {"step": 2, "loss": 3}]})
    )
    assert samples(path) == [(1, {"loss": 2.5}), (2, {"loss": 3.0})]


# Files of other makes


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("run.csv", gzip.compress(CSV.encode()), "format: packed with gzip"),
        ("run.csv", b"PAR1" + b"\0" * 100, "format: a Parquet file"),
        ("run.csv", CSV.encode("utf-16-le"), "header: no text, or UTF-16 without its byte-order mark"),
        ("run.csv", b"", "header: there is none"),
        ("run.csv", b"step,loss\n" + b"7" * 5000 + b",3\n", "step: '777"),
        ("run.csv", b"step,loss\n1,\x1b[2J\x07\n", "loss: '\ufffd[2J\ufffd' is not a number"),
        ("run.csv", b"a,b\x07\n1,2\n", "no such column in the header; there are: a, b\ufffd"),
        ("run.jsonl", b'{"step": ' + b"9" * 6000 + b"}\n", "json: Exceeds the limit"),
        ("run.json", b'{"log_history": ' + b"[" * 100_000, "json: nested too deep"),
        ("x.sqlite", b"SQLite format 3\x00" + b"\1" * 4000, "store: "),
        ("run.log", b" iteration 5/ 10 | lm loss: 1,0 |\n", "loss: '1,0' is not a number"),
    ],
)
def test_what_it_is_is_said_in_one_short_line(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    code, _, err = told(path)
    assert code == 2
    assert all(line.startswith(f"{path}:") and len(line) < len(str(path)) + 4 * SHOWN for line in err), err
    assert said in err[0]
    assert err[0].isprintable()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.csv", CSV), ("run.tsv", CSV.replace(",", "\t")), ("semicolons.csv", CSV.replace(",", ";")),
        ("run", CSV), ("old-mac.csv", CSV.replace("\n", "\r")),
        ("run.json", json.dumps({"log_history": [{"step": 1, "loss": 3.0}]})),
        ("list.json", json.dumps([{"step": 1, "loss": 3.0}])),
        ("run.log", " iteration 1/ 10 | lm loss: 3.0E+00 | learning rate: 1.0E-04 |\n"),
        ("rows.log", '{"step": 1, "loss": 3.0}\n'),
    ],
)  # fmt: skip
def test_encodings_and_separators(tmp_path: Path, name: str, text: str, encoding: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode(encoding))
    assert samples(path)[0][0] == 1


def test_a_pipe_and_a_loop_of_links_are_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "loop.csv").symlink_to("loop.csv")
    for name in ("pipe.csv", "loop.csv"):
        assert told(tmp_path / name)[0] == 2


def test_what_came_before_a_line_without_an_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text(" iteration 1/ 10 | lm loss: 2.0 |\n" + "1" * 3_000_000)
    code, out, err = told(path)
    assert code == 2
    assert out.startswith("1 step of 1 run could be read")
    assert err == [f"{path}:2: line: longer than 1048576 characters"]


def test_thousands_have_commas_and_decimals_have_none(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text(" iteration 1/ 10 | lm loss: 1,234.5 | grad norm: 12,345 |\n")
    assert samples(path) == [(1, {"loss": 1234.5, "grad_norm": 12345.0})]


def test_nemos_progress_bar_of_before(tmp_path: Path) -> None:
    path = tmp_path / "nemo.log"
    bars = [
        f"Epoch 0: :  {step}%|#| {step}/100 [00:1{step}<01:00, v_num=0, reduced_train_loss={10 - step}.50, "
        f"global_step={step}.000, consumed_samples={8 * step}.0, grad_norm=1.25]"
        for step in range(1, 6)
    ]
    path.write_text("\r".join(bars))
    assert samples(path) == [(step, {"loss": 10.5 - step, "grad_norm": 1.25}) for step in range(1, 6)]


# Folders


def test_folders_are_searched_for_each_runs_own_log(tmp_path: Path) -> None:
    def put(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    history = json.dumps({"log_history": [{"step": 1, "loss": 3.0}]})
    for step in (500, 1000, 1500):
        put(f"hf/checkpoint-{step}/trainer_state.json", history)
    put("hf/checkpoint-best/readme.txt", "")
    put("lightning/version_0/metrics.csv", CSV)
    put("lightning/version_0/checkpoints/metrics.csv", CSV)
    put("lightning/version_1/metrics.csv", CSV)
    put("wandb/run-1/files/wandb-history.jsonl", '{"_step": 1, "loss": 3.0}\n')
    names = [recording.run for recording in open_path(tmp_path)]
    assert names == ["hf", "version_0", "version_1", "run-1"]
    put("loose/a.csv", CSV)
    with pytest.raises(BadInput, match=r"give files by name: a\.csv"):
        open_path(tmp_path / "loose")


# Bundles


def test_a_bundle_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "LIMIT_BYTES", 1000)
    path = tmp_path / "b.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("manifest.json", json.dumps({"format": 1, "run": "r", "sha256": {}}))
        archive.writestr("samples.json", b" " * 100_000)
    assert told(path)[2] == [f"{path}:1: samples.json: larger than 1000 bytes"]


@pytest.mark.parametrize("manifest", ["[]", "3", "{", '{"format": "1"}', '{"format": 1}', "[" * 50_000])
def test_an_archive_of_another_make_is_no_bundle(tmp_path: Path, manifest: str) -> None:
    path = tmp_path / "b.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", manifest)
    (line,) = told(path)[2]
    assert line.startswith(f"{path}:1: bundle: ")
    assert "indices" not in line, "what Python says is for programmers"


# The command line


def test_a_wrong_policy_is_bad_input_and_long_files_are_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    with path.open("wb") as handle:
        handle.truncate(3 << 30)  # sparse: nothing is written, and reading it all would take the memory of three of it
    done = CliRunner().invoke(build(), ["policy", "check", str(path)])
    assert (done.exit_code, done.stderr) == (2, f"{path}:1: policy: longer than 65536 bytes\n")
    for arguments in (["policy", "check", str(tmp_path)], ["policy", "compare", "observe", "typo", str(path)]):
        done = CliRunner().invoke(build(), arguments)
        assert done.exit_code == 2
        assert ":1: policy: " in done.stderr


class Full(io.StringIO):
    """A disk that is full after the first line."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        if self.getvalue():
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("out_format", ["jsonl", "table"])
@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left on device")])
def test_an_output_that_fails_is_not_the_inputs_fault(tmp_path: Path, out_format: Any, error: OSError) -> None:
    path = tmp_path / "run.csv"
    path.write_text(CSV + "".join(f"{step},nan\n{step + 1},3\n" for step in range(121, 400, 40)))
    err, out = io.StringIO(), Full(error)
    out.write("a line")
    with pytest.raises(OutputFailed) as caught:
        replay([path], out_format=out_format, out=out, err=err)
    assert f"{path}:" not in err.getvalue()
    assert caught.value.is_unread is isinstance(error, BrokenPipeError)


def test_a_full_disk_is_said_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "run.csv").write_text(CSV)
    program = [sys.executable, "-m", "fp8watch.cli", "replay", "run.csv"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(program, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    said = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
    assert (done.returncode, said) == (3, ["fp8watch: standard output: No space left on device"])
