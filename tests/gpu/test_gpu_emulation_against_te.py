"""fp8watch's CPU emulation against the real Transformer Engine: identical scales, nearly the same numbers.

python -m pytest tests/gpu/test_gpu_emulation_against_te.py -m gpu
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
te = pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from transformer_engine.common import recipe as te_recipe  # noqa: E402

from fp8watch import emulation  # noqa: E402
from fp8watch.capture.emulated import EmulatedSource  # noqa: E402
from fp8watch.capture.te.source import TeSource  # noqa: E402
from fp8watch.emulation.linear import Fp8Linear  # noqa: E402

IN, OUT, ROWS = 256, 512, 128
MAX = {"input": 448.0, "weight": 448.0, "grad_output": 57344.0}


def recipes(algorithm: str, length: int) -> tuple[Any, Any]:
    return (
        te_recipe.DelayedScaling(
            fp8_format=te_recipe.Format.HYBRID, amax_history_len=length, amax_compute_algo=algorithm
        ),
        emulation.DelayedScaling(amax_history_len=length, amax_compute_algo=algorithm),
    )


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("algorithm", "length"), [("max", 16), ("most_recent", 16), ("most_recent", 1)])
def test_teacher_forced_scales_are_equal_to_the_bit(algorithm: str, length: int) -> None:
    torch.manual_seed(0)
    theirs, ours = recipes(algorithm, length)
    real = te.Linear(IN, OUT, params_dtype=torch.bfloat16).cuda()
    emulated = Fp8Linear(IN, OUT, device="cuda", dtype=torch.bfloat16, recipe=ours)
    emulated.load_state_dict({name: real.state_dict()[name] for name in ("weight", "bias")})
    generator = torch.Generator("cuda").manual_seed(1)
    for step in range(50):
        size = 2.0 ** (3 * math.sin(step / 4))  # up and down by 64, so that windows matter and some casts saturate
        x = torch.randn(ROWS, IN, device="cuda", generator=generator).mul_(size).bfloat16()
        gradient = torch.randn(ROWS, OUT, device="cuda", generator=generator).mul_(1e-3 / size).bfloat16()
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        with te.autocast(enabled=True, recipe=theirs):
            output = real(a)
        output.backward(gradient)
        with emulation.autocast(emulated):
            mine = emulated(b)
        mine.backward(gradient)
        forward, backward = real.fp8_meta["scaling_fwd"], real.fp8_meta["scaling_bwd"]
        assert torch.equal(forward.scale[:2], emulated.scaling_forward.scale), step
        assert torch.equal(forward.amax_history[:, :2], emulated.scaling_forward.amax_history), step
        assert torch.equal(backward.scale[:1], emulated.scaling_backward.scale), step
        assert torch.equal(backward.amax_history[:, :1], emulated.scaling_backward.amax_history), step
        assert relative(mine, output) < 0.01, step
        assert relative(b.grad, a.grad) < 0.01, step
        assert relative(emulated.weight.grad, real.weight.grad) < 0.01, step
        assert relative(emulated.bias.grad, real.bias.grad) < 0.01, step
        with torch.no_grad():
            change = torch.randn(OUT, IN, device="cuda", generator=generator).mul_(0.01 * size).bfloat16()
            for layer in (real, emulated):
                layer.weight.add_(change)
                layer.weight.grad = layer.bias.grad = None


def headroom(source: Any, reading: Any) -> dict[str, float]:
    rows = zip(source.columns(), reading.values["amax"].tolist(), reading.values["scale"].tolist(), strict=True)
    return {
        column.name: math.log2(MAX[column.tensor] / (amax * scale))
        for column, amax, scale in rows
        if column.tensor in MAX and amax > 0
    }


def test_free_running_headroom_stays_within_half_a_bit() -> None:
    theirs, ours = recipes("max", 16)
    torch.manual_seed(0)
    bf16 = {"params_dtype": torch.bfloat16}
    real = torch.nn.Sequential(te.Linear(IN, OUT, **bf16), torch.nn.GELU(), te.Linear(OUT, IN, **bf16)).cuda()
    emulated = torch.nn.Sequential(
        Fp8Linear(IN, OUT, device="cuda", dtype=torch.bfloat16, recipe=ours), torch.nn.GELU(),
        Fp8Linear(OUT, IN, device="cuda", dtype=torch.bfloat16, recipe=ours),
    )  # fmt: skip
    emulated.load_state_dict({k: v for k, v in real.state_dict().items() if not k.endswith("_extra_state")})
    sources = TeSource(real), EmulatedSource(emulated)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (real, emulated)]
    generator = torch.Generator("cuda").manual_seed(2)
    target = torch.randn(IN, IN, device="cuda", generator=generator)
    try:
        for step in range(20):
            x = torch.randn(ROWS, IN, device="cuda", generator=generator).bfloat16()
            wanted = (x.float() @ target / IN**0.5).bfloat16()
            found = []
            regions = (lambda: te.autocast(enabled=True, recipe=theirs), lambda: emulation.autocast(emulated))
            for model, source, optimizer, region in zip((real, emulated), sources, optimizers, regions, strict=True):
                source.begin(with_statistics=False)
                with region():
                    output = model(x)
                (output - wanted).float().square().mean().backward()
                found.append(headroom(source, source.read()))
                optimizer.step()
                optimizer.zero_grad()
            assert found[0].keys() == found[1].keys()
            assert len(found[0]) == 6
            worst = max(abs(found[0][name] - found[1][name]) for name in found[0])
            assert worst <= 0.5, (step, worst)
    finally:
        for source in sources:
            source.detach()
