from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_run import TinyRun

from fp8watch.errors import ActionError


def controls(run: TinyRun) -> Any:
    assert run.context.controls is not None
    return run.context.controls


@pytest.fixture
def run() -> TinyRun:
    made = TinyRun(fp8=True)
    made.run(5)
    return made


# case: NUM-32
def test_bf16_layers_read_back_and_revert(run: TinyRun) -> None:
    applied = run.apply("bf16_layers", layers=["3"])
    assert run.read_back("bf16_layers", applied).ok is None
    run.step()
    assert run.read_back("bf16_layers", applied).ok is True
    assert controls(run).ran_high_precision(["0", "3"]) == [False, True]
    assert applied.expected["extra_memory_bytes"] == 32 * 16
    run.actions["bf16_layers"].revert(applied)
    run.step()
    assert controls(run).ran_high_precision(["0", "3"]) == [False, False]
    assert run.read_back("bf16_layers", applied).ok is False


def test_bf16_all_and_a_layer_that_two_actions_hold(run: TinyRun) -> None:
    layer = run.apply("bf16_layers", layers="3")
    everything = run.apply("bf16_all")
    run.step()
    assert run.read_back("bf16_all", everything).ok is True
    run.actions["bf16_all"].revert(everything)
    run.step()
    assert controls(run).ran_high_precision(["0", "3"]) == [False, True]
    run.actions["bf16_layers"].revert(layer)
    run.step()
    assert controls(run).ran_high_precision(["0", "3"]) == [False, False]


def test_one_layer_at_a_time_can_come_back(run: TinyRun) -> None:
    import dataclasses

    applied = run.apply("bf16_all")
    run.step()
    run.actions["bf16_all"].revert(dataclasses.replace(applied, params={"layers": ["0"]}))
    run.step()
    assert controls(run).ran_high_precision(["0", "3"]) == [False, True]
    assert run.read_back("bf16_all", applied).ok is True
    run.actions["bf16_all"].revert(dataclasses.replace(applied, params={"layers": ["3"]}))
    run.step()
    assert controls(run).ran_high_precision(["0", "3"]) == [False, False]


def test_bf16_really_changes_the_numbers(run: TinyRun) -> None:
    inputs = torch.randn(8, 16)
    run.model.eval()
    with torch.no_grad():
        in_fp8 = run.model(inputs)
        run.apply("bf16_all")
        in_bf16 = run.model(inputs)
    assert not torch.equal(in_fp8, in_bf16)


@pytest.mark.parametrize("name", ["bf16_layers", "bf16_all"])
def test_a_switch_that_does_nothing_is_noticed(run: TinyRun, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controls(run), "set_high_precision", lambda *args, **kwargs: None)
    applied = run.apply(name, layers=["0"])
    run.step()
    found = run.read_back(name, applied)
    assert found.ok is False
    assert "still ran in FP8" in found.detail


def test_margin_read_back_and_revert(run: TinyRun) -> None:
    before = controls(run).scales(["0:weight", "3:input"])
    applied = run.apply("raise_margin", bits=2.0)
    assert run.read_back("raise_margin", applied).ok is None
    run.run(2)
    found = run.read_back("raise_margin", applied)
    assert found.ok is True
    assert found.observed["margin"] == 2.0
    after = controls(run).scales(["0:weight", "3:input"])
    assert after["0:weight"] == pytest.approx(before["0:weight"] / 4, rel=0.2)
    run.actions["raise_margin"].revert(applied)
    assert controls(run).margin() == 0.0


def test_a_margin_that_the_update_does_not_read_is_noticed(run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Transformer Engine when a new recipe object is passed: it says margin 2 and scales as before."""
    told: list[float] = []
    monkeypatch.setattr(controls(run), "set_margin", told.append)
    monkeypatch.setattr(controls(run), "margin", lambda: told[-1] if told else 0.0)
    applied = run.apply("raise_margin", bits=2.0)
    run.run(2)
    found = run.read_back("raise_margin", applied)
    assert found.ok is False
    assert "not followed" in found.detail


def spoil_scale(run: TinyRun, factor: float) -> None:
    """A scale that is off, as bookkeeping faults leave it: a poisoned amax window."""
    layer = run.model.get_submodule("3")
    state = layer.scaling_forward
    state.scale[state.tensors.index("weight")] *= factor


def test_repair_sets_the_scale_that_amax_demands(run: TinyRun) -> None:
    healthy = controls(run).scales(["3:weight"])["3:weight"]
    spoil_scale(run, 64.0)
    applied = run.apply("repair_scale", tensors=["3:weight"])
    assert controls(run).scales(["3:weight"])["3:weight"] == pytest.approx(healthy, rel=0.2)
    assert run.read_back("repair_scale", applied).ok is None
    run.step()
    assert run.read_back("repair_scale", applied).ok is True
    with pytest.raises(ActionError):
        run.actions["repair_scale"].revert(applied)


def test_a_repair_that_does_nothing_is_noticed(run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = controls(run).scales(["3:weight"])["3:weight"]
    spoil_scale(run, 64.0)
    monkeypatch.setattr(controls(run), "repair_scales", lambda tensors: {name: healthy for name in tensors})

    def stuck() -> None:
        controls(run)
        state = run.model.get_submodule("3").scaling_forward
        state.scale[state.tensors.index("weight")] = healthy * 64.0

    applied = run.apply("repair_scale", tensors=["3:weight"])
    run.step()
    stuck()  # the fault holds the scale where it was
    found = run.read_back("repair_scale", applied)
    assert found.ok is False
    assert "back where they were" in found.detail


def test_a_repair_by_a_library_that_does_nothing_is_noticed(run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale that the library says it has set is the faulty one: only the amax can tell."""
    monkeypatch.setattr("fp8watch.emulation.scaling.ScalingState.purge", lambda *_: None)
    spoil_scale(run, 2.0**12)
    frozen = controls(run).scales(["3:weight"])["3:weight"]
    applied = run.apply("repair_scale", tensors=["3:weight"])
    run.step()
    state = run.model.get_submodule("3").scaling_forward
    state.scale[state.tensors.index("weight")] = frozen
    found = run.read_back("repair_scale", applied)
    assert found.ok is False
    assert "still clips its amax: 3:weight" in found.detail


def test_repair_of_layers_and_of_everything(run: TinyRun) -> None:
    of_layer = run.apply("repair_scale", layers=["3"])
    assert set(of_layer.expected["scales"]) == {"3:input", "3:weight", "3:grad_output"}
    everything = run.apply("repair_scale")
    assert len(everything.expected["scales"]) == 6


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("bf16_layers", {}),
        ("bf16_layers", {"layers": []}),
        ("bf16_layers", {"layers": ["nowhere"]}),
        ("repair_scale", {"tensors": ["3:nothing"]}),
        ("raise_margin", {"bits": 0.0}),
        ("raise_margin", {"bits": 99}),
    ],
)
def test_bad_parameters_change_nothing(run: TinyRun, name: str, params: dict[str, Any]) -> None:
    with pytest.raises(ActionError):
        run.apply(name, **params)
    assert controls(run).margin() == 0.0
    assert not run.context.high_precision


@pytest.mark.parametrize("name", ["bf16_layers", "bf16_all", "raise_margin", "repair_scale"])
def test_without_fp8_modules_they_are_unavailable(name: str) -> None:
    plain = TinyRun(fp8=False)
    assert "no FP8 module" in (plain.actions[name].unavailable() or "")
    with pytest.raises(ActionError):
        plain.apply(name)
