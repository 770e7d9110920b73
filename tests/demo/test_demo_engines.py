"""The demo on Transformer Engine: when it is chosen, what it makes of the model, and that faults do there what they do
in the emulation. The library is a stand-in; tests/gpu/test_gpu_demo.py has the real one."""

from __future__ import annotations

import dataclasses
import sys

import double_te
import msgspec
import pytest
import torch
import typer
from typer.testing import CliRunner

import fp8watch.demo.cli
from fp8watch.demo.cli import demo
from fp8watch.demo.config import EngineName, TrainingConfig
from fp8watch.demo.engines import engine
from fp8watch.demo.engines.choice import choose
from fp8watch.demo.model import GPT, Shape, layer_names
from fp8watch.demo.plan import Plan, make_plan
from fp8watch.demo.scenarios.base import Fault, Setting
from fp8watch.demo.scenarios.catalogue import SCENARIOS
from fp8watch.demo.trainer import Bare, Training, build, train
from fp8watch.errors import BadInput

TINY = TrainingConfig(steps=8, batch_size=2, length=16, num_layers=1, width=32, engine="transformer_engine")
LAYER, OTHER = "blocks.0.mlp.down", "blocks.0.attention.qkv"
FAULT_STEP = 4


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> type[double_te.FP8GlobalStateManager]:
    return double_te.install(monkeypatch)


# --- which ---------------------------------------------------------------------------------------


def test_a_cpu_emulates_and_says_nothing() -> None:
    def load(name: str) -> object:
        raise AssertionError(f"{name} is looked for")

    assert choose("cpu", load) == choose("cpu")
    assert dataclasses.astuple(choose("cpu", load)) == ("emulation", "")


@pytest.mark.usefixtures("manager")
def test_a_gpu_with_the_library_runs_on_it() -> None:
    assert dataclasses.astuple(choose("cuda")) == ("transformer_engine", "FP8 by Transformer Engine 2.20.2")


@pytest.mark.parametrize("error", [ImportError("no libnvrtc"), OSError("undefined symbol"), RuntimeError("CUDA 11")])
def test_a_library_that_cannot_be_loaded_is_told_and_done_without(error: Exception) -> None:
    def load(name: str) -> object:
        raise error

    chosen = choose("cuda", load)
    assert chosen.engine == "emulation"
    assert chosen.told.startswith("FP8 is emulated on the GPU: Transformer Engine cannot be imported")
    assert str(error) in chosen.told


def test_a_gpu_without_fp8_and_an_old_library_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    double_te.install(monkeypatch, problem="Device compute capability 8.9 or higher required.")
    assert choose("cuda").told == "FP8 is emulated on the GPU: Device compute capability 8.9 or higher required."
    monkeypatch.delattr(sys.modules["transformer_engine.pytorch"], "autocast")
    assert choose("cuda").engine == "emulation"
    assert "older than the demo knows" in choose("cuda").told


@pytest.mark.usefixtures("manager")
def test_the_choice_goes_into_all_three_trainings_and_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []

    def stop(plan: Plan, with_unwatched: bool) -> None:
        plans.append(plan)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(fp8watch.demo.cli, "_run_json", stop)
    app = typer.Typer()
    app.command()(demo)
    done = CliRunner().invoke(app, ["--device", "cuda", "--json"])
    assert done.exit_code == 0, done.output
    assert done.stderr == "FP8 by Transformer Engine 2.20.2\n"
    assert done.stdout == ""
    for spec in (plans[0].watched, plans[0].twin, plans[0].unwatched):
        assert (spec.config.device, spec.config.engine) == ("cuda", "transformer_engine")


@pytest.mark.parametrize("name", ["frozen-scale", "gradient-underflow"])
def test_a_fault_of_the_scales_needs_scales(name: str) -> None:
    with pytest.raises(BadInput, match="--fault-step: 1: Transformer Engine has no scales"):
        make_plan(scenario=name, fault_step=1, device="cuda", engine="transformer_engine")
    make_plan(scenario=name, fault_step=1)
    make_plan(scenario="nan-loss", fault_step=1, device="cuda", engine="transformer_engine")


# --- the model -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("manager")
def test_linears_of_the_blocks_are_the_librarys_and_hold_what_they_held() -> None:
    torch.manual_seed(0)
    shape = Shape(num_layers=2, width=32, length=16)
    model = GPT(shape)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine("transformer_engine").convert(model, amax_history_len=4)
    theirs = [name for name, module in model.named_modules() if isinstance(module, double_te.Linear)]
    assert theirs == layer_names(shape)
    assert type(model.head) is torch.nn.Linear
    after = {name: value for name, value in model.state_dict().items() if not name.endswith("_extra_state")}
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.usefixtures("manager")
def test_a_bias_moves_and_a_width_that_fits_no_gemm_is_named() -> None:
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([torch.nn.Linear(16, 32)])})
    bias = model["blocks"][0].bias.clone()
    engine("transformer_engine").convert(model, amax_history_len=4)
    assert torch.equal(model["blocks"][0].bias, bias)
    odd = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([torch.nn.Linear(16, 30)])})
    with pytest.raises(ValueError, match=r"blocks\.0: 30 x 16 are no multiples of 16"):
        engine("transformer_engine").convert(odd, amax_history_len=4)


def losses_of(config: TrainingConfig) -> list[float]:
    losses: list[float] = []
    train(build(config, Fault()), Bare(), lambda step, loss: losses.append(loss))
    return losses


def test_it_trains_as_the_emulation_does(manager: type[double_te.FP8GlobalStateManager]) -> None:
    theirs, ours = losses_of(TINY), losses_of(msgspec.structs.replace(TINY, engine="emulation"))
    assert theirs == pytest.approx(ours, rel=1e-4)
    (recipe,) = manager.recipes_seen
    assert (recipe.amax_history_len, recipe.amax_compute_algo, recipe.fp8_format) == (1024, "max", "HYBRID")


# --- faults --------------------------------------------------------------------------------------


class Seen(Bare):
    """Keeps scales (input, weight, grad_output of each layer asked for) and gradients of every step."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.training = training
        self.scales: list[dict[str, torch.Tensor]] = []
        self.grads: list[torch.Tensor] = []

    def clip_grad_norm_(self, parameters: object, max_norm: float) -> torch.Tensor:
        self.grads.append(self.training.model.get_submodule(LAYER).weight.grad.clone())
        return super().clip_grad_norm_(parameters, max_norm)  # type: ignore[arg-type]

    def step(self, loss: torch.Tensor, /) -> None:
        super().step(loss)
        found = {}
        for layer in (LAYER, OTHER):
            (both,) = engine(self.training.config.engine).scales(self.training.model, layer)
            found[layer] = torch.cat([scales.scale for scales in both])
        self.scales.append(found)


def make(name: str, layer: str | None, config: TrainingConfig = TINY) -> Fault:
    chosen = layer if SCENARIOS[name].takes_layer else None
    return SCENARIOS[name].make(Setting(config=config, fault_step=FAULT_STEP, layer=chosen))


def run(name: str, layer: str | None = None, config: TrainingConfig = TINY) -> Seen:
    seen = Seen(build(config, make(name, layer, config)))
    train(seen.training, seen, lambda step, loss: None)
    return seen


@pytest.mark.parametrize("kind", ["emulation", "transformer_engine"])
@pytest.mark.usefixtures("manager")
def test_frozen_scales_are_64_times_too_large_and_stay(kind: EngineName) -> None:
    seen = run("frozen-scale", config=msgspec.structs.replace(TINY, engine=kind))
    before, after = seen.scales[FAULT_STEP - 2], seen.scales[FAULT_STEP - 1]
    for layer in (LAYER, OTHER):
        assert torch.equal(after[layer], before[layer] * 64)
        assert torch.equal(seen.scales[-1][layer], after[layer])


@pytest.mark.usefixtures("manager")
def test_a_scale_written_into_a_frozen_state_takes_effect_and_stays() -> None:
    training = build(TINY, make("frozen-scale", None))
    meta = training.model.get_submodule(LAYER).fp8_meta

    class Repaired(Bare):
        def step(self, loss: torch.Tensor, /) -> None:
            super().step(loss)
            if self.global_step == FAULT_STEP + 1:
                meta["scaling_fwd"].scale.fill_(3.0)

    train(training, Repaired(), lambda step, loss: None)
    assert meta["scaling_fwd"].scale[:2].tolist() == [3.0, 3.0]


def test_a_named_layer_alone_is_frozen_and_the_rest_is_updated(
    manager: type[double_te.FP8GlobalStateManager],
) -> None:
    seen = run("frozen-scale", layer=OTHER, config=msgspec.structs.replace(TINY, peak_lr=0.3, amax_history_len=2))
    step = FAULT_STEP - 1
    assert torch.equal(seen.scales[-1][OTHER], seen.scales[step][OTHER])
    assert not torch.equal(seen.scales[-1][LAYER], seen.scales[step][LAYER])
    # A second layer that sticks in the same process goes through the same patch.
    patched = manager.reduce_and_update_fp8_tensors
    next(engine("transformer_engine").scales(seen.training.model, LAYER))[0].stick()
    assert manager.reduce_and_update_fp8_tensors is patched


@pytest.mark.usefixtures("manager")
def test_gradient_scales_are_too_small_and_stay_until_the_window_is_purged() -> None:
    seen, healthy = run("gradient-underflow"), run("healthy")
    meta = seen.training.model.get_submodule(LAYER).fp8_meta
    before, after = seen.scales[FAULT_STEP - 2][LAYER], seen.scales[FAULT_STEP - 1][LAYER]
    assert after[2] == before[2] * 2.0**-24
    assert torch.equal(after[:2], healthy.scales[FAULT_STEP - 1][LAYER][:2])
    assert seen.scales[-1][LAYER][2] == after[2]
    assert torch.isfinite(meta["scaling_fwd"].amax_history).all()
    assert torch.equal(seen.grads[FAULT_STEP - 2], healthy.grads[FAULT_STEP - 2])
    error = seen.grads[FAULT_STEP - 1] - healthy.grads[FAULT_STEP - 1]
    assert error.any()
    meta["scaling_bwd"].amax_history.nan_to_num_(posinf=0.0)
    with seen.training.region():
        logits = seen.training.model(torch.zeros(2, 16, dtype=torch.int64))
    logits.square().mean().backward()
    assert meta["scaling_bwd"].scale[0] > after[2] * 2.0**12


@pytest.mark.parametrize("name", ["nan-loss", "bit-flip", "outlier-channel"])
@pytest.mark.usefixtures("manager")
def test_a_fault_in_a_layer_is_the_same_on_both(name: str) -> None:
    """The others are in schedule and data, which no engine sees."""
    series = []
    for kind in ("transformer_engine", "emulation", None):
        config = msgspec.structs.replace(TINY, engine=kind or "emulation", steps=FAULT_STEP + 1)
        losses: list[float] = []
        fault = make(name, LAYER, config) if kind else Fault()
        train(build(config, fault), Bare(), lambda step, loss, to=losses: to.append(loss))
        series.append(losses)
    theirs, ours, healthy = series
    assert theirs == pytest.approx(ours, rel=1e-5, nan_ok=True)
    assert theirs[: FAULT_STEP - 1] == pytest.approx(healthy[: FAULT_STEP - 1], rel=1e-5)
    assert theirs[FAULT_STEP - 1 :] != pytest.approx(healthy[FAULT_STEP - 1 :], rel=1e-5)
