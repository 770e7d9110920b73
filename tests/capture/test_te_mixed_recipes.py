"""Modules of Transformer Engine that mix recipes: FP8 attention under current scaling, custom recipes.

The state holds the slots with delayed scaling only, the list of quantizers all of them (TE 2.20
`pytorch/attention/dot_product_attention/dot_product_attention.py` 1420: six of current scaling, then three of delayed).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_te_delayed import FP8_MAX, Library

from fp8watch.capture.te.source import TeSource
from fp8watch.capture.te.tap import UPDATE


class Float8CurrentScalingQuantizer:
    """Keeps nothing."""


class IdentityQuantizer:
    """High precision, of a custom recipe."""


class Float8Quantizer:
    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = scale


class DotProductAttention(torch.nn.Module):
    """S and dP have delayed scaling, the rest current scaling."""

    def __init__(self, *, is_mixed: bool = True) -> None:
        super().__init__()
        self.fp8 = True
        self.fp8_meta: dict[str, Any] = {"recipe": SimpleNamespace(margin=0, amax_compute_algo="max")}
        self.quantizers: dict[str, list[Any]] = {}
        for key, a_gemm in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            num = a_gemm if is_mixed else 3 * a_gemm
            state = SimpleNamespace(scale=torch.ones(num), amax_history=torch.zeros(4, num))
            self.fp8_meta[key] = state
            others: list[Any] = [Float8CurrentScalingQuantizer() for _ in range(3 * a_gemm - num)]
            self.quantizers[key] = [*others, *map(Float8Quantizer, state.scale)]


def step(library: Library, module: Any, forward: list[float], backward: list[float]) -> None:
    for key, amax, is_forward in (("scaling_fwd", forward, True), ("scaling_bwd", backward, False)):
        state = module.fp8_meta[key]
        getattr(library, UPDATE)(
            torch.tensor(amax), [state.amax_history], [state.scale], "max", FP8_MAX[is_forward]
        )  # fmt: skip


def shown(source: TeSource, reading: Any) -> dict[str, float]:
    rows = zip(source.columns(), reading.values["amax"].tolist(), reading.validity("amax").tolist(), strict=True)
    return {column.name: value for column, value, is_seen in rows if is_seen}


def test_attention_under_current_scaling_shows_its_softmax_and_names_the_rest() -> None:
    library, module = Library(), DotProductAttention()
    source = TeSource(torch.nn.ModuleDict({"core": module}), extension=library)
    try:
        for _ in range(3):
            source.begin(with_statistics=False)
            step(library, module, [0.0, 0.0, 0.75], [0.0, 0.125])
            reading = source.read()
        assert shown(source, reading) == {"core.s:output": 0.75, "core.s:grad_output": 0.125}
        (entry,) = source.not_observable()
        assert entry.startswith("core: qkv:input, o:output, qkv:grad_input, o:grad_output (Float8CurrentScaling")
        assert source.not_observable() is source.not_observable(), "a step compares no more than that"
    finally:
        source.detach()


def test_attention_under_delayed_scaling_alone_names_nothing() -> None:
    library, module = Library(), DotProductAttention(is_mixed=False)
    source = TeSource(torch.nn.ModuleDict({"core": module}), extension=library)
    try:
        for _ in range(3):
            source.begin(with_statistics=False)
            step(library, module, [0, 0, 3.0, 2.0, 0, 0, 0, 0, 0.75], [5.0, 0, 0, 4.0, 0, 0.125])
            reading = source.read()
        assert shown(source, reading) == {
            "core.qkv:input": 3.0, "core.o:output": 2.0, "core.s:output": 0.75,
            "core.qkv:grad_input": 5.0, "core.o:grad_output": 4.0, "core.s:grad_output": 0.125,
        }  # fmt: skip
        assert source.not_observable() == []
    finally:
        source.detach()


class Linear(torch.nn.Module):
    """A custom recipe: input with delayed scaling, weight with another, output's gradient as given."""

    def __init__(self, gradient: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4))
        self.fp8 = True
        inner = SimpleNamespace(margin=1, amax_compute_algo="max")
        forward = SimpleNamespace(scale=torch.ones(1), amax_history=torch.zeros(4, 1), _ds_state=object(),
                                  _inner_delayed_scaling_recipe=inner)  # fmt: skip
        backward = SimpleNamespace(scale=None, amax_history=None)
        self.fp8_meta = {"recipe": SimpleNamespace(), "scaling_fwd": forward, "scaling_bwd": backward}
        current = Float8CurrentScalingQuantizer
        self.quantizers = {
            "scaling_fwd": [Float8Quantizer(forward.scale[0]), current(), current()],
            "scaling_bwd": [gradient, current()],
        }


@pytest.mark.parametrize("is_plain", [False, True])
def test_tensors_of_a_custom_recipe_are_told_by_their_quantizers(is_plain: bool) -> None:
    library, module = Library(), Linear(IdentityQuantizer())
    if is_plain:
        module.quantizers["scaling_fwd"][1] = IdentityQuantizer()
    source = TeSource(torch.nn.ModuleDict({"a": module}), extension=library)
    try:
        for _ in range(3):
            source.begin(with_statistics=False)
            state = module.fp8_meta["scaling_fwd"]
            getattr(library, UPDATE)(torch.tensor([2.0]), [state.amax_history], [state.scale], "max", 448.0)
            reading = source.read()
        assert shown(source, reading) == {"a:input": 2.0}
        assert [column.margin for column in source.columns()] == [1.0]
        named = [entry for entry in source.not_observable() if "a:weight" in entry]
        assert len(named) == (0 if is_plain else 1), "high precision is not unseen, a cast that passes unread is"
    finally:
        source.detach()
