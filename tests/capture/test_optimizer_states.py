"""Moments in FP8: torchao's own optimizer, and COAT's layout, computed with its formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fp8watch.capture.optimizer_states import PARAMETERS_A_CALL, OptimizerStates


def watched(state: dict[str, object]) -> OptimizerStates:
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = state
    return OptimizerStates(optimizer)


def test_torchao_moments_are_read_as_it_reads_them_itself():
    torchao = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 64, bias=False))
    optimizer = torchao.AdamWFp8(model.parameters(), lr=1e-3)
    states = OptimizerStates(optimizer)
    assert states.read() == {}
    with torch.compiler.set_stance("force_eager"):
        for seed in range(3):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
            x[:, :8] *= 1e-4  # gradients of these columns are tiny beside their neighbours'
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = states.read()
    for moment in ("exp_avg", "exp_avg_sq"):
        held = [optimizer.state[p][moment] for p in model.parameters()]
        plain = [m.dequantize() for m in held]
        assert found[f"{moment}_amax"].item() == pytest.approx(max(p.abs().max().item() for p in plain))
        zeros = [(p == 0).sum().item() for p in plain]
        assert found[f"{moment}_underflow_ratio"].item() == pytest.approx(sum(zeros) / sum(p.numel() for p in plain))
        ratios = [z / p.numel() for z, p in zip(zeros, plain, strict=True)]
        assert found[f"{moment}_underflow_ratio_max"].item() == pytest.approx(max(ratios))
    # The second moment is a square: what is 1e-4 beside its neighbours there is 1e-8, below E4M3's range.
    assert found["exp_avg_sq_underflow_ratio"] > found["exp_avg_underflow_ratio"]
    assert found["exp_avg_sq_underflow_ratio_max"] > 0.1
    assert states.not_observable is None


def coat(values: np.ndarray, group: int = 8) -> dict[str, torch.Tensor]:
    """The quantizer of COAT's optimizer with dynamic range expansion, for one moment."""
    rows = np.abs(values.reshape(-1, group)) + 1e-20
    top, low = rows.max(1), rows.min(1)
    centre = np.sqrt(top * low)
    expand = np.floor(np.log2(448.0**2 / 2) / np.log2(np.maximum(top / low, 1.0001)) * 8) / 8
    expand = np.clip(expand, 1 / 8, 8)
    scale = (top / centre) ** expand / 448.0
    codes = (rows / centre[:, None]) ** expand[:, None] / scale[:, None]
    tensor = torch.tensor(codes * np.sign(values.reshape(-1, group)), dtype=torch.float32)
    return {
        "exp_avg": tensor.to(torch.float8_e4m3fn).reshape(values.shape),
        "scale_exp_avg": torch.tensor(scale, dtype=torch.float32),
        "expand_exp_avg": torch.tensor(expand, dtype=torch.float32),
        "sqrt_minmax_exp_avg": torch.tensor(centre, dtype=torch.float32),
    }


def test_coat_moments_with_range_expansion():
    values = np.random.default_rng(0).standard_normal(64).astype(np.float32) * 3e-4
    found = watched(coat(values)).read()
    assert found["exp_avg_amax"].item() == pytest.approx(np.abs(values).max(), rel=0.05)
    assert found["exp_avg_underflow_ratio"].item() == 0.0
    assert "exp_avg_sq_amax" not in found


def test_coat_moments_without_expansion_underflow_in_their_group_only():
    codes = torch.ones(2, 128)
    codes[0, :32] = 0.0
    codes[1] = 0.0  # a group of nothing but zeros has lost nothing
    state = {"exp_avg_sq": codes.to(torch.float8_e5m2), "scale_exp_avg_sq": torch.tensor([2.0, 0.5])}
    found = watched(state).read()
    assert found["exp_avg_sq_amax"].item() == 2.0
    assert found["exp_avg_sq_underflow_ratio"].item() == pytest.approx(32 / 256)


def test_a_last_group_that_is_not_full():
    codes = torch.ones(10)
    codes[9] = 0.0
    state = {"exp_avg": codes.to(torch.float8_e4m3fn), "scale_exp_avg": torch.tensor([1.0, 1.0, 3.0])}  # 4, 4, 2
    found = watched(state).read()
    assert found["exp_avg_amax"].item() == 3.0
    assert found["exp_avg_underflow_ratio"].item() == pytest.approx(1 / 10)


def test_many_parameters_are_read_in_turn():
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(PARAMETERS_A_CALL + 5)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for i, parameter in enumerate(parameters):
        codes = torch.ones(4)
        codes[: i % 2] = 0.0
        optimizer.state[parameter] = {
            "exp_avg": codes.to(torch.float8_e4m3fn),
            "scale_exp_avg": torch.tensor([1.0 + i]),
        }
    states = OptimizerStates(optimizer)
    assert states.read()["exp_avg_amax"] == PARAMETERS_A_CALL
    found = states.read()
    assert found["exp_avg_amax"] == PARAMETERS_A_CALL + 5
    zeros = sum(i % 2 for i in range(len(parameters)))
    assert found["exp_avg_underflow_ratio"].item() == pytest.approx(zeros / (4 * len(parameters)))
    assert found["exp_avg_underflow_ratio_max"].item() == 0.25


def test_plain_moments_say_nothing_and_other_layouts_are_named():
    plain = watched({"exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4, dtype=torch.bfloat16)})
    assert plain.read() == {}
    assert plain.not_observable is None
    without_scale = watched({"exp_avg": torch.zeros(4).to(torch.float8_e4m3fn)})
    assert without_scale.read() == {}
    assert "without a scale" in without_scale.not_observable
    bytes_only = watched({"exp_avg": torch.zeros(4, dtype=torch.uint8)})
    assert bytes_only.read() == {}
    assert "uint8" in bytes_only.not_observable
    subclass = pytest.importorskip("torchao.optim.subclass_8bit", reason="torchao is not installed")
    eight = watched({"exp_avg": subclass.OptimState8bit.zeros((256,), signed=True, block_size=256)})
    assert eight.read() == {}
    assert "OptimState8bit" in eight.not_observable
