"""Shadow probe, what-if figures and their cost on a GPU: right numbers, no waiting, no effect on training.

python -m pytest tests/gpu/test_gpu_closer_look.py -m gpu
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from fp8watch import what_if  # noqa: E402
from fp8watch.capture.closer import CloserLook, CloserOptions  # noqa: E402
from fp8watch.capture.cost_meter import CostMeter  # noqa: E402
from fp8watch.capture.shadow_probe import ShadowProbe  # noqa: E402
from fp8watch.formats import E4M3, expected_gemm_error  # noqa: E402

ORDINARY = expected_gemm_error(E4M3, E4M3)
DEVICE = torch.device("cuda")


def without_waiting(work: Callable[[], Any]) -> Any:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        return work()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def finish(closer: CloserLook, source: Any) -> tuple[Any, dict[str, Any]]:
    """As the recorder does at a boundary."""
    closer.governor.step_took(0.01)
    return closer.finish(source.read(), source.columns)


def te_model(te: Any) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        te.Linear(256, 512, params_dtype=torch.bfloat16),
        te.LayerNormLinear(512, 512, normalization="LayerNorm", zero_centered_gamma=True, params_dtype=torch.bfloat16),
        te.LayerNormLinear(512, 512, normalization="RMSNorm", bias=False, params_dtype=torch.bfloat16),
        te.LayerNormMLP(512, 1024, params_dtype=torch.bfloat16),
        te.Linear(512, 256, params_dtype=torch.bfloat16),
    ).cuda()


def te_step(te: Any, model: torch.nn.Module, recipe: Any, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16, generator=generator)
    with te.autocast(enabled=True, recipe=recipe):
        output = model(x)
    output.float().square().mean().backward()
    return output


@pytest.mark.parametrize("name", ["DelayedScaling", "Float8CurrentScaling"])
def test_layers_of_transformer_engine_have_the_error_of_their_formats(name: str) -> None:
    te = pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
    recipes = pytest.importorskip("transformer_engine.common.recipe")
    recipe = getattr(recipes, name)()
    model = te_model(te)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)  # norms and biases that are not the identity
    probe = ShadowProbe(dict(model.named_children()), CostMeter(DEVICE))
    assert probe.names == ["0", "1", "2", "4"]
    assert "LayerNormMLP" in probe.not_probeable["3"]
    for seed in range(3):
        te_step(te, model, recipe, seed)
    for layer in probe.names:
        assert probe.arm(layer)
        te_step(te, model, recipe, 5)
        found = probe.take()
        assert found is not None, probe.missed
        print(name, layer, type(model[int(layer)]).__name__, found[1].item())
        assert found[1].item() == pytest.approx(ORDINARY, rel=0.3)


# case: HOK-15
def test_a_probe_neither_waits_nor_changes_a_bit() -> None:
    te = pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
    recipe = pytest.importorskip("transformer_engine.common.recipe").DelayedScaling()

    def run(*, is_probed: bool) -> list[torch.Tensor]:
        model = te_model(te)
        probe = ShadowProbe(dict(model.named_children()), CostMeter(DEVICE))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kept = []
        for seed in range(5):
            if is_probed:
                probe.arm(probe.names[seed % len(probe.names)])
            if seed == 4:
                kept.append(without_waiting(lambda: te_step(te, model, recipe, 4)).detach())
            else:
                kept.append(te_step(te, model, recipe, seed).detach())
            if is_probed:
                assert without_waiting(probe.take) is not None
            optimizer.step()
            optimizer.zero_grad()
        state = [model[0].fp8_meta["scaling_fwd"].amax_history.clone(), model[0].fp8_meta["scaling_bwd"].scale.clone()]
        return [*kept, *state, *(p.detach() for p in model.parameters()), torch.cuda.get_rng_state().cuda()]

    run(is_probed=True)  # kernels are loaded
    assert all(torch.equal(a, b) for a, b in zip(run(is_probed=True), run(is_probed=False), strict=True))


def test_torchao_layers_are_looked_at_closely_without_waiting() -> None:
    float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed")
    from fp8watch.capture.torchao.float8 import TorchaoSource

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512))
    model = float8.convert_to_float8_training(model.cuda().bfloat16())
    source = TorchaoSource(model)
    closer = CloserLook(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), source=source, modules=("0", "2"),
        device=DEVICE, options=CloserOptions(statistics_every=1, what_if_every=1, shadow_every=1, overhead_budget=99.0),
        not_observed=lambda name, reason: print(name, reason),
    )  # fmt: skip
    x = torch.randn(4096, 512, device="cuda", dtype=torch.bfloat16)

    def step(number: int) -> Any:
        closer.begin(number)
        model(x).float().square().mean().backward()
        return finish(closer, source)

    try:
        for number in range(1, 6):
            step(number)  # columns become known, kernels are compiled
        reading, _ = without_waiting(lambda: step(6))
        for number in range(7, 12):
            step(number)
            torch.cuda.synchronize()
    finally:
        closer.detach()
        source.detach()
    error = reading.values["shadow_error"][reading.valid["shadow_error"]]
    assert error.item() == pytest.approx(ORDINARY, rel=0.3)
    snr = reading.values[what_if.column("current", "snr")]
    assert torch.allclose(snr, reading.values["snr"], atol=0.05)  # torchao's scale is the current one
    assert closer.governor.share() > 0
    print({kind: f"{closer.governor.share(kind):.3%}" for kind in ("statistics", "what_if", "shadow")}, "of 10 ms")


def test_the_meter_sees_what_the_device_did() -> None:
    meter = CostMeter(DEVICE)
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    x @ x
    torch.cuda.synchronize()
    with meter.piece():
        for _ in range(20):
            x @ x
    meter.close_step()
    assert list(meter.take()) == []  # still running: not waited for
    torch.cuda.synchronize()
    (seconds,) = meter.take()
    assert 0.01 < seconds < 1.0  # 20 x 1.1e12 operations


def test_casts_of_transformer_engine_are_compared_with_other_recipes() -> None:
    te = pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
    recipe = pytest.importorskip("transformer_engine.common.recipe").DelayedScaling()
    from fp8watch.capture.te.source import TeSource

    model = te_model(te)
    source = TeSource(model)
    modules = [name for name, _ in model.named_children()]
    closer = CloserLook(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), source=source, modules=modules,
        device=DEVICE, options=CloserOptions(statistics_every=1, what_if_every=2, shadow_every=0, overhead_budget=99.0),
        not_observed=lambda name, reason: print(name, reason),
    )  # fmt: skip

    def step(number: int) -> Any:
        closer.begin(number)
        te_step(te, model, recipe, 1)
        return finish(closer, source)[0]

    try:
        for number in range(1, 13):  # gradients pass another layer a step, until all scales have seen theirs
            step(number)
        reading = step(13)
        names = [column.name for column in source.columns()]
        valid = reading.valid[what_if.column("current", "snr")].tolist()
        snr = {
            key: dict(zip(names, reading.values[name].tolist(), strict=True))
            for key, name in (("as_is", "snr"), *((c, what_if.column(c, "snr")) for c in what_if.CANDIDATES))
        }
    finally:
        closer.detach()
        source.detach()
    seen = [name for name, ok in zip(names, valid, strict=True) if ok]
    assert {f"{m}:{t}" for m in ("0", "1", "4") for t in ("input", "weight", "grad_output")} <= set(seen)
    for name in seen:
        print(name, {key: round(values[name], 1) for key, values in snr.items()})
        # The same data every step: delayed scaling has what current scaling would make, and a margin costs little.
        assert snr["current"][name] == pytest.approx(snr["as_is"][name], abs=0.5)
        assert snr["margin_1"][name] == pytest.approx(snr["as_is"][name], abs=1.5)
        assert snr["mxfp8"][name] > 29
