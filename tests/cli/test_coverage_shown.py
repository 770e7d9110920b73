"""A layer that is never called is named in attach's layout, in frames, in /metrics' figures and by the commands."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fp8watch
from fp8watch import columns
from fp8watch.cli import build
from fp8watch.commands.coverage import of_run
from fp8watch.controller.stores.memory import MemoryStore
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.emulation import convert
from fp8watch.records import Hello, Layout, RunRecord, StepFrame, TensorColumn
from fp8watch_agent.metrics_state import MetricsState


class Idle(nn.Module):
    """A model with a layer that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def emulated() -> Idle:
    model = Idle()
    convert(model)
    return model


def torchao() -> Idle:
    float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed")
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    return float8.convert_to_float8_training(Idle(), config=config)


class Kept:
    """Stands in for the transport: keeps what is sent."""

    made: ClassVar[list[Kept]] = []

    def __init__(self, **options: Any) -> None:
        self.sent: list[Any] = []
        Kept.made.append(self)

    def send(self, message: Any) -> bool:
        self.sent.append(message)
        return True

    def take(self) -> list[Any]:
        return []

    def notes(self) -> list[str]:
        return []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


def train(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Layout], list[StepFrame], list[str]]:
    monkeypatch.setenv("FP8WATCH_DIR", str(tmp_path / "fp8watch"))
    monkeypatch.setenv("FP8WATCH_REPORT", "0")
    monkeypatch.setattr("fp8watch.training.assemble.Channel", Kept)
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = fp8watch.attach(model, optimizer, run="r")
    for _ in range(6):
        loss = model(torch.randn(8, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.step(loss)
    missing = watch.not_observable
    watch.detach()
    assert watch.failures == {}
    sent = Kept.made[-1].sent
    return (
        [message for message in sent if isinstance(message, Layout)],
        [message for message in sent if isinstance(message, StepFrame)],
        missing,
    )


@pytest.mark.parametrize("make", [emulated, torchao])
def test_a_layer_never_called_is_named_and_never_shown_as_zeros(make, tmp_path, monkeypatch):  # case: HOK-01
    layouts, frames, missing = train(make, tmp_path, monkeypatch)
    assert [text for text in missing if text.startswith("idle: has not run")] == [
        text for text in missing if "idle" in text
    ]
    assert any(text.startswith("idle: has not run") for text in missing)
    last = layouts[-1]
    assert (last.observed_modules, last.expected_modules) == (1, 2)
    assert {column.module for column in last.columns} == {"used"}
    by_id = {layout.layout_id: layout for layout in layouts}
    for frame in frames:
        layout = by_id.get(frame.layout_id)
        if layout is None or "amax" not in frame.columns:
            continue
        values, valid = columns.unpack(frame.columns["amax"])
        for column, value, ok in zip(layout.columns, values, valid, strict=True):
            assert not ok or (column.module == "used" and value > 0)

    state = MetricsState(clock=lambda: 0.0)
    for message in (*layouts, *frames):
        state.observe(message)
    figures = {family.metric.name: family.samples for family in state.snapshot()}
    assert figures["fp8watch_observed_modules"] == [(("r",), 1.0)]
    assert figures["fp8watch_expected_modules"] == [(("r",), 2.0)]
    assert not any("idle" in labels for labels, _ in figures["fp8watch_tensor_amax"])


def test_it_comes_back_once_it_runs():
    from fp8watch.capture.emulated import EmulatedSource

    torch.manual_seed(0)
    model = emulated()
    source = EmulatedSource(model)
    try:
        for step in range(6):
            source.begin(with_statistics=True)
            output = model(torch.randn(8, 32)) if step < 4 else model.idle(model.used(torch.randn(8, 32)))
            output.sum().backward()
            reading = source.read()
            names = [column.name for column in source.columns()]
            assert len(reading.values["amax"]) == len(names) == (3 if 2 <= step < 4 else 6)
            assert len(source.not_observable()) == (1 if 2 <= step < 4 else 0)
        assert np.all(reading.valid["amax"].numpy())
    finally:
        source.detach()


def test_a_te_module_that_was_never_called_is_named():
    from fp8watch.capture.te.delayed import _why_unseen

    layer = nn.Linear(4, 4)
    layer.fp8_meta = {}
    layer.fp8 = False
    assert _why_unseen(layer, 5) is None  # no base module of TE's: nothing is known of it
    layer.activation_dtype = None
    assert _why_unseen(layer, 0) is None  # not before there was a step
    assert _why_unseen(layer, 1) == "has not run yet"
    layer.activation_dtype = torch.bfloat16  # ran, outside FP8, by the user's own wish
    assert _why_unseen(layer, 5) is None


def layout(rank: int, modules: list[str], missing: list[str]) -> Layout:
    described = [TensorColumn(module=name, tensor="input", block="0", fp8_format="e4m3") for name in modules]
    return Layout(
        run="r", attempt=0, rank=rank, layout_id=1, columns=described, not_observable=missing,
        expected_modules=len(modules) + len(missing), observed_modules=len(modules),
    )  # fmt: skip


def test_coverage_of_several_ranks_is_by_name():
    store = MemoryStore()
    assert of_run(store, "r") is None
    store.append("r", [layout(0, [], []), layout(0, ["a", "b"], ["c: never ran"]), layout(1, ["b", "d"], [])])
    seen = of_run(store, "r")
    assert (seen.observed, seen.expected, seen.missing) == (3, 4, ["c: never ran"])
    assert seen.text() == "3 of 4 FP8 modules observed; not observed: c: never ran"
    assert not seen.is_whole


def test_doctor_and_runs_show_say_what_is_not_seen(tmp_path):
    hello = Hello(
        wire_version=1, run="r", attempt=0, rank=0, local_rank=0, world_size=1, pid=1, host="h", time_unix=0.0, step=0
    )
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    store = SqliteStore(folder / "store.sqlite")
    record = RunRecord(run="r", state="ended", hello=hello, started_unix=1.0, updated_unix=2.0)
    store.append("r", [record, layout(0, ["used"], ["idle: has not run in training since attach"])])
    store.close()
    runner = CliRunner()
    doctor = runner.invoke(build(), ["doctor", "--dir", str(tmp_path), "--no-with-torch", "--json"])
    lines = {item["name"]: item for item in json.loads(doctor.stdout)}
    assert lines["run r"]["result"] == "absent"
    assert "1 of 2 FP8 modules observed; not observed: idle: has not run" in lines["run r"]["detail"]
    shown = runner.invoke(build(), ["runs", "show", "r", "--dir", str(tmp_path)])
    assert "1 of 2 FP8 modules" in shown.stdout
