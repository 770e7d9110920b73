"""The Transformer Engine adapter on a real GPU with the real library.

python -m pytest tests/gpu -m gpu
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
te = pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from transformer_engine.common.recipe import DelayedScaling, Format  # noqa: E402

import fp8watch  # noqa: E402
from fp8watch.capture.te.controls import TeControls  # noqa: E402
from fp8watch.capture.te.delayed import TeDelayedSource  # noqa: E402


def mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        te.Linear(256, 512, params_dtype=torch.bfloat16),
        te.LayerNormMLP(512, 1024, params_dtype=torch.bfloat16),
        te.Linear(512, 256, params_dtype=torch.bfloat16),
    ).cuda()


def forward(model: torch.nn.Module, recipe: Any, seed: int, factor: float = 1.0) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, generator=generator) * factor
    with te.autocast(enabled=True, recipe=recipe):
        return model(x).float().pow(2).mean()


def recipe(**options: Any) -> Any:
    return DelayedScaling(fp8_format=Format.HYBRID, **{"amax_history_len": 16, "amax_compute_algo": "max", **options})


@pytest.mark.parametrize("history_len", [1, 16])
def test_columns_hold_what_the_library_used(history_len: int) -> None:
    model, scaling = (
        mlp(),
        recipe(amax_history_len=history_len, amax_compute_algo="max" if history_len > 1 else "most_recent"),
    )
    source = TeDelayedSource(model)
    try:
        before: dict[str, float] = {}
        for step in range(5):
            source.begin(with_statistics=False)
            forward(model, scaling, step).backward()
            reading = source.read()
            assert reading is not None
            names = [column.name for column in source.columns()]
            used = dict(zip(names, reading.values["scale"].tolist(), strict=True))
            amax = dict(zip(names, reading.values["amax"].tolist(), strict=True))
            if before:
                assert used["0:input"] == before["0:input"]
                assert used["1.fc2:weight"] == before["1.fc2:weight"]
            assert amax["0:input"] > 3
            assert amax["1.fc2:grad_output"] > 0
            state = model[0].fp8_meta["scaling_fwd"]
            before = {
                "0:input": float(state.scale[0]),
                "1.fc2:weight": float(model[1].fp8_meta["scaling_fwd"].scale[4]),
            }
        assert source.not_observable() == []
        assert reading.updates_forward == reading.updates_backward == 1
    finally:
        source.detach()


def test_a_module_goes_to_bf16_and_comes_back_with_fresh_scales() -> None:
    model, scaling = mlp(), recipe(amax_history_len=1, amax_compute_algo="most_recent")
    controls = TeControls(model)
    for step in range(3):
        forward(model, scaling, step).backward()
    assert controls.modules() == ["0", "1", "2"]
    controls.set_high_precision(["0"], high_precision=True)
    assert controls.ran_high_precision(["0", "2"]) == [None, False]
    for step in range(3):
        forward(model, scaling, step, factor=8.0).backward()
    assert controls.ran_high_precision(["0", "2"]) == [True, False]
    stale = controls.scales(["0:input"])["0:input"]
    controls.set_high_precision(["0"], high_precision=False)
    fresh = controls.scales(["0:input"])["0:input"]
    assert fresh < stale / 4
    forward(model, scaling, 9, factor=8.0).backward()
    assert controls.ran_high_precision(["0"]) == [False]


def test_margin_and_repair_take_effect_in_the_library() -> None:
    model, scaling = mlp(), recipe(amax_history_len=64)
    controls = TeControls(model)
    for step in range(3):
        forward(model, scaling, step).backward()
    normal = controls.scales(["0:weight"])["0:weight"]
    controls.set_margin(2.0)
    forward(model, scaling, 4).backward()
    assert controls.margin() == 2.0
    assert controls.scales(["0:weight"])["0:weight"] == pytest.approx(normal / 4, rel=0.05)
    controls.set_margin(0.0)
    model[0].fp8_meta["scaling_fwd"].amax_history[-1, 0] = float("inf")
    forward(model, scaling, 5, factor=16.0).backward()
    poisoned = controls.scales(["0:input"])["0:input"]
    repaired = controls.repair_scales(["0:input"])["0:input"]
    assert repaired < poisoned / 4
    assert controls.scales(["0:input"])["0:input"] == repaired


PROGRAM = """
import sys, torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Format
watched = sys.argv[1] != "bare"
torch.manual_seed(0)
model = torch.nn.Sequential(*(te.LayerNormMLP(256, 512, params_dtype=torch.bfloat16) for _ in range(3))).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
if watched:
    import fp8watch
    watch = fp8watch.attach(model, optimizer, policy=sys.argv[1], run="te-" + sys.argv[1])
for step in range(30):
    if step == 10:
        torch.cuda.set_sync_debug_mode("error")
    x = torch.randn(32, 256, device="cuda", dtype=torch.bfloat16)
    with te.autocast(enabled=True, recipe=recipe):
        loss = model(x).float().pow(2).mean()
    loss.backward()
    if watched:
        watch.clip_grad_norm_(model.parameters(), 1.0)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(); optimizer.zero_grad()
    if watched:
        watch.step(loss)
torch.cuda.set_sync_debug_mode("default")
digest = torch.stack([p.double().sum() for p in model.parameters()]).sum().item()
print("RESULT", repr(loss.item()), repr(digest), torch.cuda.get_rng_state().sum().item())
if watched:
    layout = watch.session.recorder.layout if hasattr(watch, "session") else None
    watch.detach()
"""


def test_attached_and_armed_is_bit_identical_and_never_synchronises(tmp_path: Path) -> None:
    environment = {**os.environ, "FP8WATCH_DIR": str(tmp_path / ".fp8watch"), "FP8WATCH_METRICS_PORT": "0"}
    results = {}
    for kind in ("bare", "observe", "auto"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, kind], env=environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr[-3000:]
        results[kind] = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert results["bare"] == results["observe"] == results["auto"]

    from fp8watch.controller.stores.sqlite import SqliteStore
    from fp8watch.records import Layout, StepFrame

    endpoint = json.loads((tmp_path / ".fp8watch" / "runs" / "te-observe" / "endpoint.json").read_text())
    store = SqliteStore(Path(endpoint["store"]), read_only=True)
    frames = list(store.read("te-observe", StepFrame))
    layouts = list(store.read("te-observe", Layout))
    assert [frame.step for frame in frames] == list(range(1, 31))
    assert layouts[-1].observed_modules == layouts[-1].expected_modules
    assert "scale" in frames[-1].columns
    assert fp8watch.__version__
