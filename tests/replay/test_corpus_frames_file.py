"""Frame files: read back to the bit, through replay as through the pipeline, and refused by name when damaged."""

from __future__ import annotations

import io
import json
import lzma
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8watch import columns
from fp8watch.detect.pipeline import Pipeline
from fp8watch.errors import BadInput
from fp8watch.records import Layout, StepFrame, TensorColumn
from fp8watch.replay import frames_file
from fp8watch.replay.frames_file import RecordedRun
from fp8watch.replay.run import replay

LAYOUT = Layout(
    run="r", attempt=0, rank=0, layout_id=1, expected_modules=1, observed_modules=1,
    columns=[TensorColumn(module="a", tensor=t, block="0", fp8_format="e4m3") for t in ("input", "weight", "output")],
)  # fmt: skip

values = st.lists(st.floats(width=32), min_size=3, max_size=3)
scalar = st.floats() | st.floats(width=32)


@st.composite
def frames(draw: st.DrawFn) -> list[StepFrame]:
    made = []
    for step in range(1, draw(st.integers(1, 6)) + 1):
        held = {}
        for name in draw(st.sets(st.sampled_from(["amax", "scale", "snr"]))):
            seen = np.array(draw(st.lists(st.booleans(), min_size=3, max_size=3)))
            held[name] = columns.pack(np.array(draw(values), np.float32), "f4", seen)
        if draw(st.booleans()):
            counts = draw(st.lists(st.integers(0, 2**64 - 1), min_size=3, max_size=3))
            held["saturated"] = columns.pack(np.array(counts, np.uint64), "u8")
        scalars = draw(st.dictionaries(st.sampled_from(["loss", "grad_norm", "lr"]), scalar))
        made.append(
            StepFrame(
                run="r", attempt=0, rank=draw(st.integers(0, 1)), step=step, layout_id=1, time_unix=1.5 * step,
                scalars=scalars, columns=held, updates_forward=draw(st.integers(1, 9)),
            )
        )  # fmt: skip
    return made


@settings(max_examples=60, deadline=None)
@given(frames())
def test_what_is_written_is_read_back_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory, written: list[StepFrame]
) -> None:
    path = tmp_path_factory.mktemp("frames") / "run.fp8rec"
    frames_file.write(path, [RecordedRun(run="r", frames=written, layouts=[LAYOUT], notes={"seed": 3})])
    (run,) = frames_file.load(path)
    assert run.layouts == [LAYOUT]
    assert run.notes == {"seed": 3}
    encode = msgspec.msgpack.Encoder(order="sorted").encode  # NaN equals itself only as bytes
    assert [encode(frame) for frame in run.frames] == [encode(f) for f in sorted(written, key=lambda f: f.rank)]


def failing_run() -> RecordedRun:
    losses = 3.0 + 0.03 * np.random.default_rng(0).standard_normal(80)
    losses[60:66] = 9.0
    made = [
        StepFrame(run="r", attempt=0, rank=0, step=i, layout_id=1, time_unix=0.0, scalars={"loss": float(loss)})
        for i, loss in enumerate(losses, start=1)
    ]
    return RecordedRun(run="r", frames=made, layouts=[LAYOUT])


def test_replay_reads_it_like_the_live_pipeline(tmp_path: Path) -> None:
    run = failing_run()
    frames_file.write(tmp_path / "run.fp8rec", [run, renamed(run)])
    pipeline, out = Pipeline("r"), io.StringIO()
    live = [(f.step, f.detector, f.severity) for sample in run.samples() for f in pipeline.observe(sample)]
    assert ("loss_spike", "act") in {(detector, severity) for _, detector, severity in live}
    assert replay([tmp_path / "run.fp8rec"], out=out, err=io.StringIO()) == 0
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    for name in ("r", "other"):
        assert [(x["step"], x["detector"], x["severity"]) for x in lines if x["run"] == name] == live


def renamed(run: RecordedRun) -> RecordedRun:
    return RecordedRun(run="other", frames=run.frames, layouts=run.layouts)


@pytest.mark.parametrize("damage", ["cut", "flip", "text", "version"])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "run.fp8rec"
    frames_file.write(path, [failing_run()])
    data = path.read_bytes()
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "flip":
        data = data[: len(data) // 2] + bytes(64) + data[len(data) // 2 + 64 :]
    elif damage == "text":
        data = lzma.compress(b"no recording")
    else:
        data = lzma.compress(msgspec.msgpack.encode({"version": 99, "runs": []}))
    path.write_bytes(data)
    with pytest.raises(BadInput, match=r"run\.fp8rec:1: recording: "):
        frames_file.load(path)
    err = io.StringIO()
    assert replay([path], out=io.StringIO(), err=err) == 2
    assert f"{path}:1: recording: " in err.getvalue()


def test_unpacking_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.fp8rec"
    frames_file.write(path, [failing_run()])
    monkeypatch.setattr(frames_file, "LIMIT_BYTES", 100)
    with pytest.raises(BadInput, match="larger than 100 bytes"):
        frames_file.load(path)
