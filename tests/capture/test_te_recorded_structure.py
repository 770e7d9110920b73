"""The adapters against the real Transformer Engine's structure, as recorded by `tests/gpu/record_structures.py`.

Replays classes, attributes, shapes and call orders of the library named in the file, which finds without a GPU an
adapter that no longer fits it, or a stand-in that never did.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import standin_te.module.layernorm_mlp as standin_mlp
import standin_te.module.linear as standin_linear
import torch
from standin_te.tensors import DType, Float8BlockwiseQTensorStorage, Float8TensorStorage, quantize
from test_te_delayed import FP8_MAX, Library

from fp8watch.capture import sources
from fp8watch.capture.te.cast_tap import ACTIVATIONS, CASTS, NORMS, WITH_BIAS
from fp8watch.capture.te.delayed import TeDelayedSource
from fp8watch.capture.te.slots import slot_names
from fp8watch.capture.te.states import DIRECTIONS
from fp8watch.capture.te.tap import UPDATE
from fp8watch.capture.te.tensors import format_name, read_scales

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "te_structure.json").read_text())
MODULES = RECORDED["modules"]
DELAYED = [name for name in MODULES if name.endswith("/delayed")]
BOUNDARY = ("output", "grad_input")
"""Slots that hold something only with FP8 output."""


def shape_of(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text[text.index("[") :]))


def rebuilt(facts: dict[str, Any]) -> torch.nn.Module:
    """A module of the recorded classes, with state of the recorded shapes."""
    bases = [name for name in facts["classes"] if name not in ("Module", "ABC", "object")]
    cls: type = torch.nn.Module
    for name in reversed(bases):
        cls = type(name, (cls,), {"__module__": facts["home"]})
    module = cls()
    recipe = SimpleNamespace(margin=0, amax_compute_algo="max")

    def meta(recorded: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"recipe": recipe}
        for key, _, _ in DIRECTIONS:
            state = recorded.get(key) or {}
            if "scale" in state:
                found[key] = SimpleNamespace(
                    scale=torch.ones(shape_of(state["scale"])), dtype=DType(int(state["dtype"])),
                    amax_history=torch.zeros(shape_of(state["amax_history"])),
                )  # fmt: skip
        return found

    if "fp8_meta" in facts:
        module.fp8_meta, module.fp8 = meta(facts["fp8_meta"]), facts["fp8"]
    else:
        module._fp8_metas = {mode: None if m is None else meta(m) for mode, m in facts["_fp8_metas"].items()}
        module.num_quantizers = lambda mode: len(facts["_quantizers"][mode])
    return module


def holders(name: str) -> dict[str, dict[str, Any]]:
    return {path or "m": facts for path, facts in MODULES[name]["held"].items()}


def test_file_says_what_was_really_run():
    assert RECORDED["versions"]["transformer_engine"].startswith("2.")
    assert len(DELAYED) == 5
    assert all("error" not in facts for facts in MODULES.values())


@pytest.mark.parametrize("name", DELAYED)
def test_our_slots_agree_with_the_roles_of_the_library(name):
    for path, facts in holders(name).items():
        module = rebuilt(facts)
        for key, forward, _ in DIRECTIONS:
            roles = facts["roles"][key]
            for slot, role in zip(slot_names(module, path, forward=forward, num_slots=len(roles)), roles, strict=True):
                assert slot is not None
                if slot[1] in BOUNDARY:
                    continue  # TE names those after who consumes them, if it knows
                assert role is not None
                assert slot[1] == role[0]
                part = role[1].rpartition(".")[2]
                assert part not in ("fc1", "fc2") or slot[0].endswith(part)


@pytest.mark.parametrize("name", DELAYED)
def test_every_recorded_state_becomes_columns(name):
    held = holders(name)
    model = torch.nn.ModuleDict({path.replace(".", "_"): rebuilt(facts) for path, facts in held.items()})
    library = Library()
    source = TeDelayedSource(model, extension=library)
    try:
        for key, forward, mode in DIRECTIONS:
            states = [
                state
                for module in model.values()
                if (m := getattr(module, "fp8_meta", None) or module._fp8_metas[mode]) and (state := m.get(key))
            ]
            amax = torch.full((sum(s.scale.numel() for s in states),), 2.0)
            getattr(library, UPDATE)(
                amax, [s.amax_history for s in states], [s.scale for s in states], "max", FP8_MAX[forward]
            )
        reading = source.read()
        assert reading is not None
        columns = source.columns()
        slots = [len(r) for facts in held.values() for r in facts["roles"].values()]
        assert len(columns) == sum(slots)
        assert {c.fp8_format for c in columns if c.tensor in ("input", "weight")} == {"e4m3"}
        assert {c.fp8_format for c in columns if c.tensor == "grad_output"} == {"e5m2"}
        assert source.not_observable() == []
    finally:
        source.detach()


@pytest.mark.parametrize("name", DELAYED)
def test_recorded_classes_are_recognised(name):
    assert any(sources._is_transformer_engine(rebuilt(facts)) for facts in holders(name).values())


def parameters(signature: str) -> list[str]:
    """Names of the parameters in pybind11's first line of help."""
    inside = signature[signature.index("(") + 1 : signature.rindex(") ->")]
    return [part.split(":")[0].strip() for part in re.split(r",(?![^\[]*\])", inside)]


def test_functions_take_the_quantizer_where_we_look_for_it():
    functions = RECORDED["functions"]
    assert functions[UPDATE] is not None
    for name, position in {**NORMS, **ACTIVATIONS, **WITH_BIAS}.items():
        if functions[name] is not None:
            assert parameters(functions[name])[position] == "quantizer", name
    for name, position in NORMS.items():
        assert parameters(functions[name])[position - 1] == "ln_out"
    for name in CASTS:
        assert parameters(functions[name])[1] == "quantizer"
    assert parameters(functions["quantize"])[2] == "output"
    assert parameters(functions["split_quantize"])[2] == "quantizer_list"
    present = [name for name in (*NORMS, *ACTIVATIONS, *WITH_BIAS) if functions[name] is not None]
    assert len(present) > 20
    for consumer in ("linear", "layernorm_linear", "layernorm_mlp"):
        names = functions[f"{consumer}.general_gemm"]
        assert re.search(r"\['A', 'B', .*'layout'", names)


@pytest.mark.parametrize("name", DELAYED)
def test_every_live_tensor_passes_a_cast_that_we_tap(name):
    live = sum(
        1
        for path, facts in holders(name).items()
        for key, forward, _ in DIRECTIONS
        for slot in slot_names(rebuilt(facts), path, forward=forward, num_slots=len(facts["roles"][key]))
        if slot is not None and slot[1] not in BOUNDARY
    )
    made = [m for call in MODULES[name]["calls"] if call[0] != "general_gemm" for m in json.loads(call[-1])]
    casts = [m for m in made if isinstance(m, dict) and "_data" in m]
    assert len(casts) == live
    assert {m["_scale_inv"] for m in casts} == {"float32[1]"}
    assert {format_name(DType(int(m["_fp8_dtype"]))) for m in casts} == {"e4m3", "e5m2"}


def block_tensors() -> list[dict[str, str]]:
    made = [m for name in MODULES if name.endswith("/block") for c in MODULES[name]["calls"] if c[0] != "general_gemm"
            for m in json.loads(c[-1])]  # fmt: skip
    return [m for m in made if isinstance(m, dict) and "_rowwise_scale_inv" in m]


def test_block_scales_of_recorded_shapes_are_read_without_their_padding():
    assert len(block_tensors()) > 10
    padded = 0
    for recorded in block_tensors():
        rows, columns = shape_of(recorded["_rowwise_data"])
        scales = torch.full(shape_of(recorded["_rowwise_scale_inv"]), 1e9)
        is_square = scales.shape[0] == -(-rows // 128) and scales.shape[1] < rows
        used = -(-columns // 128) if is_square else rows
        scales[:, :used] = 0.25
        padded += used < scales.shape[1]
        data = torch.zeros(rows, columns, dtype=torch.uint8)
        found = read_scales(Float8BlockwiseQTensorStorage(data, scales, _is_2D_scaled=is_square))
        assert found is not None
        assert float(found.worst) == 0.25
    assert padded


def test_stand_in_makes_tensors_of_the_recorded_shapes():
    for recorded in block_tensors():
        rows, columns = shape_of(recorded["_rowwise_data"])
        scales = shape_of(recorded["_rowwise_scale_inv"])
        if scales[1] >= rows:  # a scale 1 x 128
            assert tuple(quantize(torch.ones(rows, columns), block=128)._rowwise_scale_inv.shape) == scales
    current = MODULES["Linear/current"]["calls"][0]
    made = json.loads(current[-1])[0]
    ours = quantize(torch.ones(shape_of(made["_data"])))
    assert type(ours).__name__ == made["class"] == Float8TensorStorage.__name__
    assert type(ours._quantizer).__name__ == made["_quantizer"]
    assert shape_of(made["_scale_inv"]) == tuple(ours._scale_inv.shape)
    assert int(made["_fp8_dtype"]) == int(ours._fp8_dtype)


@pytest.mark.parametrize(
    ("name", "module"), [("Linear", standin_linear.Linear), ("LayerNormMLP", standin_mlp.LayerNormMLP)]
)
def test_stand_in_calls_its_gemms_in_the_recorded_order(name, module, monkeypatch):
    calls: list[str] = []
    home = standin_linear if name == "Linear" else standin_mlp
    original = home.general_gemm

    def noted(a, b, **options):
        calls.append(options.get("layout", "TN"))
        return original(a, b, **options)

    monkeypatch.setattr(home, "general_gemm", noted)
    module(16, 16).forward(torch.ones(4, 16, requires_grad=True)).sum().backward()
    assert calls == [call[1] for call in MODULES[f"{name}/current"]["calls"] if call[0] == "general_gemm"]


def test_controls_find_the_recipes_that_the_update_reads():
    state = RECORDED["global"]
    assert {"global_amax_buffer", "global_scale_buffer", "autocast_arguments"} <= set(state["fields"])
    assert state["autocast_arguments"][0] == "DelayedScaling"
    assert state["keys_of_buffers_are_those_of_arguments"]
    assert {"margin", "amax_compute_algo", "amax_history_len"} <= set(RECORDED["recipes"]["DelayedScaling"])


def test_weights_in_fp8_only_are_told_by_what_we_ask_for():
    primary = RECORDED["primary_weights"]
    assert primary["primary_weights_in_fp8"] is True
    assert "_quantizer" in primary["weight"]
