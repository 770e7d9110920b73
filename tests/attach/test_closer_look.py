"""What-if figures, shadow probes and their budget, from attach to the frame."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from watched_training import Trainer

import fp8watch
from fp8watch import columns, what_if
from fp8watch.formats import E4M3, expected_gemm_error
from fp8watch.records import Layout, StepFrame


def frames_of(channel) -> dict[int, StepFrame]:
    return {frame.step: frame for frame in channel().of(StepFrame)}


def row_values(channel, frame: StepFrame, name: str) -> dict[str, float]:
    layout = channel().of(Layout)[-1] if channel().of(Layout) else channel().preamble[1]
    values, valid = columns.unpack(frame.columns[name])
    rows = zip(layout.columns, values.tolist(), valid.tolist(), strict=True)
    return {column.name: value for column, value, ok in rows if ok}


def float8_model() -> nn.Sequential:
    float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed")
    torch.manual_seed(0)
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    return float8.convert_to_float8_training(
        nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), config=config
    )


def float8_loss(run: nn.Module, seed: int) -> torch.Tensor:
    return run(torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))).square().sum()


def test_samples_come_when_they_are_due_and_only_then(channel, monkeypatch):
    monkeypatch.setenv("FP8WATCH_WHAT_IF_EVERY", "4")
    monkeypatch.setenv("FP8WATCH_SHADOW_EVERY", "3")
    trainer = Trainer()
    watch = fp8watch.attach(trainer.model, trainer.optimizer, run="r")
    trainer.steps(watch, 13)
    watch.detach()
    assert watch.failures == {}
    frames = frames_of(channel)
    assert [step for step, frame in frames.items() if set(what_if.COLUMNS) <= frame.columns.keys()] == [5, 9, 13]
    probed = {
        step: row_values(channel, frame, "shadow_error")
        for step, frame in frames.items()
        if "shadow_error" in frame.columns
    }
    assert {step: list(found) for step, found in probed.items()} == {
        4: ["0:input"], 7: ["2:input"], 10: ["0:input"], 13: ["2:input"],
    }  # fmt: skip
    for found in probed.values():
        (error,) = found.values()
        assert error == pytest.approx(expected_gemm_error(E4M3, E4M3), rel=0.4)
    counted = row_values(channel, frames[9], what_if.column("current", "saturated"))
    assert set(counted) == {f"{m}:{t}" for m in ("0", "2") for t in ("input", "weight", "grad_output")}
    assert frames[9].scalars["statistics_every"] == 1
    assert frames[9].scalars["what_if_every"] == 4
    assert frames[9].scalars["shadow_every"] == 3
    assert 0 < frames[9].scalars["sampling_ratio"] < 5
    assert "what_if_every" not in frames[10].scalars  # said when it is news
    assert "quantized" in frames[10].columns  # counted every step, as ever


def test_a_stale_scale_shows_in_the_what_if_figures(channel, monkeypatch):
    monkeypatch.setenv("FP8WATCH_WHAT_IF_EVERY", "4")
    trainer = Trainer()
    watch = fp8watch.attach(trainer.model, trainer.optimizer, run="r")
    trainer.steps(watch, 8)
    trainer.model[0].scaling_forward.scale.mul_(8)
    trainer.steps(watch, 1)
    watch.detach()
    frame = frames_of(channel)[9]
    as_is = row_values(channel, frame, "saturated")["0:input"]
    assert as_is > 0
    now = {
        name: row_values(channel, frame, what_if.column(name, "saturated"))["0:input"] for name in what_if.CANDIDATES
    }
    assert as_is > now["margin_1"] > now["margin_2"] >= now["current"]
    assert now["block"] == now["mxfp8"] == 0


def test_asked_for_layers_are_looked_at_in_the_next_steps(channel, monkeypatch):
    monkeypatch.setenv("FP8WATCH_WHAT_IF_EVERY", "0")
    monkeypatch.setenv("FP8WATCH_SHADOW_EVERY", "0")
    trainer = Trainer()
    watch = fp8watch.attach(trainer.model, trainer.optimizer, run="r")
    trainer.steps(watch, 3)
    watch.look_closer(["2", "0", "no such layer"])
    trainer.steps(watch, 4)
    watch.detach()
    frames = frames_of(channel)
    with_what_if = [step for step, frame in frames.items() if what_if.column("block", "snr") in frame.columns]
    assert with_what_if == [5]  # step 4 had begun when it was asked
    assert len(row_values(channel, frames[5], what_if.column("block", "snr"))) == 6
    assert {
        step: list(row_values(channel, frame, "shadow_error"))
        for step, frame in frames.items()
        if "shadow_error" in frame.columns
    } == {5: ["2:input"], 6: ["0:input"]}


def test_over_its_budget_sampling_is_thinned_and_amax_is_not(channel, monkeypatch, caplog):
    monkeypatch.setenv("FP8WATCH_WHAT_IF_EVERY", "2")
    monkeypatch.setenv("FP8WATCH_SHADOW_EVERY", "2")
    monkeypatch.setenv("FP8WATCH_OVERHEAD_BUDGET", "0.001")
    trainer = Trainer()
    watch = fp8watch.attach(trainer.model, trainer.optimizer, run="r")
    trainer.steps(watch, 60)
    watch.detach()
    frames = frames_of(channel)
    assert "fp8watch: sampling thinned" in caplog.text
    last = [frame.scalars for frame in frames.values() if "what_if_every" in frame.scalars][-1]
    assert last["what_if_every"] > 2
    assert last["shadow_every"] > 2
    assert sum(what_if.column("block", "snr") in frame.columns for frame in frames.values()) < 15
    assert all(columns.unpack(frame.columns["amax"])[1].all() for frame in frames.values())
    assert len(frames) == 60


def test_fp8_moments_are_reported_and_other_layouts_named(channel):
    torchao = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    optimizer = torchao.AdamWFp8(model.parameters(), lr=1e-3)
    watch = fp8watch.attach(model, optimizer, run="r")
    with torch.compiler.set_stance("force_eager"):
        for _ in range(3):
            loss = model(torch.randn(4, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss)
    watch.detach()
    scalars = frames_of(channel)[3].scalars
    assert scalars["exp_avg_amax"] > 0
    assert 0 <= scalars["exp_avg_sq_underflow_ratio"] <= scalars["exp_avg_sq_underflow_ratio_max"] <= 1
    assert watch.failures == {}

    optimizer = torchao.AdamW8bit(model.parameters(), lr=1e-3, block_size=64)
    watch = fp8watch.attach(model, optimizer, run="s")
    with torch.compiler.set_stance("force_eager"):
        loss = model(torch.randn(4, 64)).square().mean()
        loss.backward()
        optimizer.step()
        watch.step(loss)
    assert any(text.startswith("optimizer states: quantized") for text in watch.not_observable)
    watch.detach()
    assert not any(name.startswith("exp_avg") for name in frames_of(channel)[1].scalars)


def test_torchao_layers_are_probed_and_compared(channel, monkeypatch):
    monkeypatch.setenv("FP8WATCH_WHAT_IF_EVERY", "2")
    monkeypatch.setenv("FP8WATCH_SHADOW_EVERY", "1")
    model = float8_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watch = fp8watch.attach(model, optimizer, run="r")
    for seed in range(5):
        loss = float8_loss(model, seed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.step(loss)
    watch.detach()
    frames = frames_of(channel)
    errors = [
        row_values(channel, frame, "shadow_error") for frame in frames.values() if "shadow_error" in frame.columns
    ]
    assert [list(found) for found in errors] == [["0:input"], ["2:input"]] * 2
    for found in errors:
        assert next(iter(found.values())) == pytest.approx(expected_gemm_error(E4M3, E4M3), rel=0.4)
    snr = row_values(channel, frames[3], what_if.column("current", "snr"))
    as_is = row_values(channel, frames[3], "snr")
    assert set(snr) == set(as_is)
    for name, value in snr.items():  # torchao scales by the tensor at hand: that is what `current` means
        assert value == pytest.approx(as_is[name], abs=0.01)
    assert watch.failures == {}


def test_compiled_layers_are_said_not_to_be_probed_and_nothing_is_traced_again(channel, monkeypatch):  # case: HOK-03
    monkeypatch.setenv("FP8WATCH_SHADOW_EVERY", "1")
    monkeypatch.setenv("FP8WATCH_WHAT_IF_EVERY", "2")
    model = float8_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watch = fp8watch.attach(model, optimizer, run="r")
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter)
    for seed in range(8):
        loss = float8_loss(compiled, seed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.step(loss)
    watch.detach()
    assert counter.frame_count == 1
    frames = frames_of(channel)
    assert not any("shadow_error" in frame.columns for frame in frames.values())
    assert not any(what_if.column("block", "snr") in frame.columns for frame in frames.values())
    assert any(
        text.startswith("shadow_error: ") and "did not run in the step of its probe" in text
        for text in watch.not_observable
    )
    assert any(text.startswith("what_if: ") for text in watch.not_observable)
    assert all(np.isfinite(columns.unpack(frame.columns["amax"])[0]).all() for frame in list(frames.values())[2:])
