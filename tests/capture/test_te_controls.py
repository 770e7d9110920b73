"""Transformer Engine's controls on a stand-in: BF16 and back, verified by what the module's last forward did."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8watch.actions.bf16_layers import Bf16Layers
from fp8watch.capture.te import controls as te_controls
from fp8watch.capture.te.controls import TeControls
from fp8watch.errors import ActionError


@contextmanager
def autocast(*, enabled: bool) -> Iterator[None]:
    before, STATE[0] = STATE[0], enabled
    try:
        yield
    finally:
        STATE[0] = before


STATE = [True]


class Linear(torch.nn.Module):
    """Decides its precision at each forward, as TE's `prepare_forward` does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4, 4), 0.5))
        self.fp8 = False
        self.fp8_meta = {
            "scaling_fwd": SimpleNamespace(scale=torch.ones(3), amax_history=torch.zeros(4, 3)),
            "scaling_bwd": SimpleNamespace(scale=torch.ones(2), amax_history=torch.zeros(4, 2)),
        }

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fp8 = STATE[0]
        return x @ self.weight


def controls_of(model: torch.nn.Module) -> TeControls:
    quantization = SimpleNamespace(FP8GlobalStateManager=SimpleNamespace(global_amax_buffer={}, autocast_arguments={}))
    return TeControls(model, library=SimpleNamespace(autocast=autocast), quantization=quantization)


def test_a_module_goes_away_and_comes_back_with_fresh_scales() -> None:
    model = torch.nn.Sequential(Linear(), Linear())
    controls = controls_of(model)
    x = torch.full((2, 4), 7.0)
    model(x).sum().backward()
    assert controls.ran_high_precision(["0", "1"]) == [False, False]
    controls.set_high_precision(["0"], high_precision=True)
    assert controls.ran_high_precision(["0", "1"]) == [None, False], "not run since the switch"
    model(x).sum().backward()
    assert controls.ran_high_precision(["0", "1"]) == [True, False]
    controls.set_high_precision(["0"], high_precision=False)
    assert controls.ran_high_precision(["0"]) == [None]
    scales = controls.scales(["0:input", "0:weight", "0:grad_output"])
    assert scales == {"0:input": 448 / 7, "0:weight": 448 / 0.5, "0:grad_output": 57344 / 2}
    model(x)
    assert controls.ran_high_precision(["0"]) == [False]
    assert STATE == [True]
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks
    with pytest.raises(ActionError, match="no module"):
        controls.set_high_precision(["7"], high_precision=True)


def test_a_model_in_bf16_fallback_can_be_copied_pickled_and_saved() -> None:  # case: HOK-09
    model = torch.nn.Sequential(Linear(), Linear())
    controls = controls_of(model)
    x = torch.full((2, 4), 7.0)
    model(x)

    def copies() -> list[torch.nn.Module]:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        return [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded]

    for away in (True, False):
        controls.set_high_precision(["0"], high_precision=away)
        for twin in copies():
            twin(x * 1000)
            assert [layer.fp8 for layer in twin] == [True, True], "a copy follows its own recipe"
        assert controls.ran_high_precision(["0"]) == [None], "what a copy ran is not what the model ran"
        model(x)
        assert controls.ran_high_precision(["0"]) == [away]
    assert controls.scales(["0:input"]) == {"0:input": 448 / 7}, "nor is what it was given"
    assert not model[0]._forward_hooks


def test_a_repair_is_held_against_the_newest_amax_and_not_against_itself() -> None:
    model = torch.nn.Sequential(Linear())
    controls = controls_of(model)
    state = model[0].fp8_meta["scaling_fwd"]
    state.amax_history[0, 0] = float("inf")
    state.amax_history[1, 0], state.amax_history[-1, 0] = 14.0, 7.0
    assert controls.repair_scales(["0:input", "0:weight"]) == {"0:input": 448 / 14}
    assert controls.highest_scales(["0:input", "0:weight"]) == {"0:input": 448 / 7}, "no amax of the weight is known"
    state.amax_history[-1, 0] = float("nan")
    assert controls.highest_scales(["0:input"]) == {}


def test_layers_that_cannot_all_be_switched_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """The action takes back the first layer when the second one fails, both ways, with scales and all."""
    model = torch.nn.Sequential(Linear(), Linear())
    controls = controls_of(model)
    context = SimpleNamespace(
        controls=controls, model=model, elsewhere=(), high_precision={}, lr=SimpleNamespace(updates=0)
    )
    action = Bf16Layers(context)  # type: ignore[arg-type]
    x = torch.full((2, 4), 7.0)
    model(x).sum().backward()

    def fails_for_the_second(name: str) -> None:
        own = getattr(te_controls, name) if name == "Away" else getattr(controls, name)

        def call(*arguments: Any) -> Any:
            if model[1] in arguments:
                raise RuntimeError("out of memory")
            return own(*arguments)

        monkeypatch.setattr(te_controls if name == "Away" else controls, name, call)

    fails_for_the_second("Away")
    with pytest.raises(ActionError, match="not all of the modules can run in BF16, none does: out of memory"):
        action.apply(1, {"layers": ["0", "1"]})
    monkeypatch.undo()
    assert controls.ran_high_precision(["1"]) == [False], "never switched"
    model(x)
    assert [layer.fp8 for layer in model] == [True, True]
    assert context.high_precision == {}
    assert not any(layer._forward_pre_hooks for layer in model)

    applied = action.apply(1, {"layers": ["0", "1"]})
    model(x).sum().backward()
    fails_for_the_second("_bring_back")
    with pytest.raises(ActionError, match="not all of the modules can run in FP8, none does: out of memory"):
        action.revert(applied)
    monkeypatch.undo()
    model(x)
    assert [layer.fp8 for layer in model] == [False, False]
    assert list(context.high_precision.values()) == [["0", "1"]]
    assert controls.scales(["0:input"]) == {"0:input": 1.0}, "as before the return"
    action.revert(applied)
    model(x)
    assert [layer.fp8 for layer in model] == [True, True]
