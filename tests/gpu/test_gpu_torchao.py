"""torchao float8 layers on a GPU: real FP8 GEMMs, eager and compiled.

python -m pytest tests/gpu/test_gpu_torchao.py -m gpu
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("torchao", reason="torchao is not installed")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: E402

from fp8watch.capture.torchao.controls import TorchaoControls  # noqa: E402
from fp8watch.capture.torchao.float8 import TorchaoSource  # noqa: E402


class Block(torch.nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def blocks(recipe: str) -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[Block() for _ in range(3)]).cuda().bfloat16()
    return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))


def train(run: Any, seed: int) -> None:
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(seed))
    run(x).float().square().mean().backward()


def read(source: TorchaoSource, run: Any, seed: int, *, statistics: bool = False) -> dict[str, torch.Tensor]:
    source.begin(with_statistics=statistics)
    train(run, seed)
    reading = source.read()
    assert reading is not None
    return {name: values.cpu() for name, values in reading.values.items()}


def _run_bare(recipe: str) -> None:
    """CUDA graphs of this torch may not get along with torchao's layers, whoever watches."""
    run = torch.compile(blocks(recipe), mode="reduce-overhead")
    try:
        for seed in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            train(run, seed)
    except RuntimeError as error:
        pytest.skip(f"does not run unwatched either: {str(error)[:100]}")
    torch.compiler.reset()


# case: HOK-19
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_layers_show_what_eager_ones_do(recipe: str, mode: str) -> None:
    torch.compiler.reset()
    if mode == "reduce-overhead":
        _run_bare(recipe)
    torch._dynamo.utils.counters.clear()
    plain, model = blocks(recipe), blocks(recipe)
    eager, source = TorchaoSource(plain), TorchaoSource(model)
    run = torch.compile(model, mode=mode)
    try:
        for seed in range(4):  # a compiled layer is known from the second step on
            torch.compiler.cudagraph_mark_step_begin()
            source.begin(with_statistics=False)
            train(run, seed)
            reading = source.read()
            expected = read(eager, plain, seed)
            torch.cuda.synchronize()
        assert reading is not None
        assert source.not_observable() == []
        # Inputs and weights of the first layer exactly, the rest as far as compiled arithmetic agrees with eager.
        assert torch.equal(reading.values["amax"][:2].cpu(), expected["amax"][:2])
        assert torch.equal(reading.values["scale"][:2].cpu(), expected["scale"][:2])
        assert torch.allclose(reading.values["amax"].cpu(), expected["amax"], rtol=0.1)
        counters = torch._dynamo.utils.counters
        assert not counters["graph_break"]
        assert counters["inductor"]["cudagraph_skips"] == 0
    finally:
        eager.detach()
        source.detach()


@pytest.mark.parametrize("statistics", [False, True])
def test_nothing_waits_for_the_device(statistics: bool) -> None:
    model = blocks("rowwise")
    source = TorchaoSource(model)
    try:
        for seed in range(3):
            read(source, model, seed, statistics=statistics)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        source.begin(with_statistics=statistics)
        train(model, 3)
        assert source.read() is not None
    finally:
        torch.cuda.set_sync_debug_mode("default")
        source.detach()


def test_bf16_and_back() -> None:
    model = blocks("tensorwise")
    source, controls = TorchaoSource(model), TorchaoControls(model)
    try:
        read(source, model, 0)
        controls.set_high_precision(["1.up"], high_precision=True)
        assert read(source, model, 1)["high_precision"].tolist() == [0] * 6 + [1] * 3 + [0] * 9
        assert controls.ran_high_precision(["1.up"]) == [True]
        controls.set_high_precision(["1.up"], high_precision=False)
        assert not read(source, model, 2)["high_precision"].any()
        assert controls.ran_high_precision(["1.up"]) == [False]
    finally:
        source.detach()
