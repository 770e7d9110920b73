"""Current and block scaling through the tap on GEMM calls, on stand-ins that call it as Transformer Engine does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import standin_te.module.base as base
import standin_te.module.grouped_linear as grouped
import standin_te.module.layernorm_mlp as mlp
import standin_te.module.linear as linear
import torch
from test_te_delayed import Library
from test_te_delayed import Linear as DelayedLinear
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8watch.capture.te.gemm_tap import GemmTap
from fp8watch.capture.te.source import WITHIN, TeSource
from fp8watch.capture.te.stateless import TeStatelessSource


def _update(amax, histories, scales, *rest):
    raise AssertionError("no delayed scaling here")


EXTENSION = SimpleNamespace(fused_amax_and_scale_update_after_reduction=_update)


def places():
    module = base.TransformerEngineBaseModule
    functions = linear.general_gemm, mlp.general_gemm, grouped.general_grouped_gemm
    return *functions, module.prepare_forward, module.end_forward


@pytest.fixture
def tap():
    before = places()
    yield GemmTap("standin_te.module")
    assert places() == before


def make(block=None, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(linear.Linear(16, 32, block), mlp.LayerNormMLP(32, 64, block), linear.Linear(32, 8, block))


def batch(seed, factor=1.0):
    return torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)) * factor


def run(model, seed, factor=1.0):
    output = model(batch(seed, factor))
    output.square().sum().backward()
    return output


def columns(source, reading, key="amax"):
    assert len(source.columns()) == len(reading.values[key])
    rows = zip(source.columns(), reading.values[key].tolist(), reading.valid[key].tolist(), strict=True)
    return {column.name: value for column, value, ok in rows if ok}


def truth(model, seed, factor=1.0):
    """amax of what each module is given, by hooks; the inside of the MLP by its arithmetic."""
    seen = {}

    def note(name, weight):
        def hook(module, args, output):
            seen[f"{name}:input"] = args[0].abs().max().item()
            seen[f"{name}:weight"] = weight(module).abs().max().item()
            output.register_hook(lambda grad: seen.update({f"{name}:grad_output": grad.abs().max().item()}))

        return hook

    model[0].register_forward_hook(note("0", lambda m: m.weight))
    model[2].register_forward_hook(note("2", lambda m: m.weight))
    run(model, seed, factor)
    return seen


NAMES = [
    f"{module}:{tensor}" for module in ("0", "1.fc1", "1.fc2", "2") for tensor in ("input", "weight", "grad_output")
]


# case: NUM-19
@pytest.mark.parametrize("block", [None, 8])
def test_every_operand_has_its_amax_and_scale(tap, block):
    model = make(block)
    source = TeStatelessSource(model, tap=tap)
    try:
        output = run(model, 3)
        reading = source.read()
        amax, scale = columns(source, reading), columns(source, reading, "scale")
        assert list(amax) == NAMES
        expected = truth(make(block), 3)
        assert {name: amax[name] for name in expected} == pytest.approx(expected, rel=1e-5)
        for column in source.columns():
            fp8_max = 57344.0 if column.tensor == "grad_output" else 448.0
            assert scale[column.name] == pytest.approx(fp8_max / amax[column.name], rel=1e-5)
            assert (column.recipe, column.source) == ("current" if block is None else "block", "tapped")
            assert column.fp8_format == ("e5m2" if column.tensor == "grad_output" else "e4m3")
        assert amax["1.fc1:weight"] == pytest.approx(model[1].fc1_weight.abs().max().item(), rel=1e-5)
        assert amax["1.fc2:weight"] == pytest.approx(model[1].fc2_weight.abs().max().item(), rel=1e-5)
        assert torch.equal(output, run(make(block), 3))
    finally:
        source.detach()


def test_first_layer_without_an_input_gradient_is_seen_too(tap):
    model = make()[:1]
    source = TeStatelessSource(model, tap=tap)
    try:
        run(model, 1)  # NT is its only backward GEMM
        assert "0:grad_output" in columns(source, source.read())
        assert tap.num_unmatched == 0
    finally:
        source.detach()


def test_micro_batches_give_the_largest_and_its_scale(tap):
    model = make()
    source = TeStatelessSource(model, tap=tap)
    try:
        for _ in range(2):
            source.begin(with_statistics=False)
            for seed, factor in ((1, 1.0), (2, 8.0), (3, 0.5)):
                run(model, seed, factor)
            reading = source.read()
        assert (reading.updates_forward, reading.updates_backward) == (3, 3)
        amax = columns(source, reading)["0:input"]
        assert amax == pytest.approx(batch(2, 8.0).abs().max().item(), rel=1e-6)
        assert columns(source, reading, "scale")["0:input"] == pytest.approx(448 / amax, rel=1e-6)
        last = columns(source, reading, "amax_last")["0:input"]
        assert last == pytest.approx(batch(3, 0.5).abs().max().item(), rel=1e-6)
    finally:
        source.detach()


def test_idle_tensor_in_one_micro_batch_does_not_raise_the_amax(tap):
    model = make()[:1]
    source = TeStatelessSource(model, tap=tap)
    try:
        run(model, 1, 0.01)
        run(model, 2, 0.0)  # a tensor of zeros gets the scale 1, as if its amax were 448
        amax = columns(source, source.read())
        assert amax["0:input"] == pytest.approx(batch(1, 0.01).abs().max().item(), rel=1e-6)
        source.begin(with_statistics=False)
        run(model, 2, 0.0)
        assert set(columns(source, source.read())) == {"0:weight"}
    finally:
        source.detach()


def test_recomputation_and_evaluation(tap):
    model = make()
    source = TeStatelessSource(model, tap=tap)
    try:
        run(model, 1)
        plain = columns(source, source.read())
        for reentrant in (True, False):
            source.begin(with_statistics=False)
            with torch.no_grad():
                model(batch(9, 1000.0))
            x = batch(1).requires_grad_()
            for module in model:
                x = checkpoint(module, x, use_reentrant=reentrant)
            x.square().sum().backward()
            reading = source.read()
            assert columns(source, reading) == plain
            assert (reading.updates_forward, reading.updates_backward) == (1, 1)
        source.begin(with_statistics=False)
        with torch.no_grad():
            model(batch(9))
        assert source.read() is None
    finally:
        source.detach()


def test_two_models_do_not_mix(tap):
    first, second = make(seed=1), make(seed=2)
    watching = TeStatelessSource(first, tap=tap), TeStatelessSource(second, tap=tap)
    run(first, 1)
    one = columns(watching[0], watching[0].read())
    assert watching[1].read() is None
    for source in watching:
        source.begin(with_statistics=False)
    outputs = first(batch(1)), second(batch(2, 50.0))  # both forwards before both backwards
    sum(output.square().sum() for output in outputs).backward()
    assert columns(watching[0], watching[0].read()) == one
    assert columns(watching[1], watching[1].read())["0:input"] > 100
    watching[0].detach()
    watching[1].begin(with_statistics=False)
    run(second, 3)
    assert watching[1].read() is not None
    watching[1].detach()


def test_tap_that_fails_is_switched_off_and_training_goes_on(tap, caplog):
    bare = run(make(), 5)

    def broken(*_):
        raise RuntimeError("no")

    tap.subscribe(broken)
    model = make()
    assert torch.equal(run(model, 5), bare)
    assert tap.num_failures == 1
    assert caplog.text.count("switched off") == 1
    tap.unsubscribe(broken)


def test_te_source_listens_once_a_recipe_without_state_is_in_use(tap):
    model = make()
    untouched = linear.general_gemm
    source = TeSource(model, extension=EXTENSION, tap=tap)
    try:
        source.begin(with_statistics=False)
        assert linear.general_gemm is untouched
        run(model, 1)
        assert source.read() is None
        assert list(source.columns()) == []
        assert [entry.split(":")[0] for entry in source.not_observable()] == ["0", "1", "2"]
        source.begin(with_statistics=False)
        assert linear.general_gemm is not untouched
        run(model, 1)
        reading = source.read()
        assert [column.name for column in source.columns()] == NAMES
        assert source.columns() is source.columns()
        assert reading.valid["amax"].all()
        assert source.not_observable() == []
    finally:
        source.detach()


def test_a_recipe_that_changes_late_in_one_of_many_modules_is_noticed(tap):
    model = torch.nn.ModuleList(torch.nn.Identity() for _ in range(200))
    for module in model:
        state = SimpleNamespace(scale=torch.ones(3), amax_history=torch.zeros(4, 3))
        module.fp8, module.fp8_meta = True, {"scaling_fwd": state}
    untouched = linear.general_gemm
    source = TeSource(model, extension=EXTENSION, tap=tap)
    try:
        for _ in range(20):
            source.begin(with_statistics=False)
        assert linear.general_gemm is untouched
        model[3].fp8_meta["scaling_fwd"] = SimpleNamespace()  # current scaling keeps no scale
        for _ in range(2 * WITHIN):
            source.begin(with_statistics=False)
        assert linear.general_gemm is not untouched
    finally:
        source.detach()


def test_te_source_says_why_gemms_cannot_be_tapped():
    model = make()
    source = TeSource(model, extension=EXTENSION, tap=GemmTap("no_such_te.module"))
    try:
        for _ in range(2):
            source.begin(with_statistics=False)
            run(model, 1)
            assert source.read() is None
        assert len(source.not_observable()) == 3
        assert all("No module named 'no_such_te'" in entry for entry in source.not_observable())
    finally:
        source.detach()


def test_layer_in_high_precision_has_no_numbers(tap):
    model = make()
    source = TeStatelessSource(model, tap=tap)
    try:
        run(model, 1)
        source.read()
        model[0].enabled = False
        source.begin(with_statistics=False)
        run(model, 1)
        assert [n for n in NAMES if n not in columns(source, source.read())] == NAMES[:3]
        assert tap.num_unmatched == 0
    finally:
        source.detach()


def test_delayed_and_stateless_modules_of_one_model_are_joined(tap):
    library = Library()
    model = nn.ModuleDict({"old": DelayedLinear(library, "old"), "new": make()})
    source = TeSource(model, extension=library, tap=tap)

    def step(*, delayed):
        source.begin(with_statistics=False)
        run(model["new"], 1)
        if delayed:
            library.micro_batch(True, {"old": [2.0, 3.0, 0.0]})
            library.micro_batch(False, {"old": [4.0, 0.0]})
        return source.read()

    try:
        step(delayed=True)
        reading = step(delayed=True)
        names = [f"new.{name}" for name in NAMES]
        amax = columns(source, reading)
        assert list(amax) == ["old:input", "old:weight", "old:grad_output", *names]
        assert [amax[f"old:{t}"] for t in ("input", "weight", "grad_output")] == [2.0, 3.0, 4.0]
        assert amax["new.0:input"] == pytest.approx(batch(1).abs().max().item(), rel=1e-6)
        assert {(c.recipe, c.module.partition(".")[0]) for c in source.columns()} == {
            ("delayed", "old"), ("current", "new"),
        }  # fmt: skip
        assert source.not_observable() == []
        assert list(columns(source, step(delayed=False))) == names
        source.begin(with_statistics=False)
        library.micro_batch(True, {"old": [2.0, 3.0, 0.0]})
        assert list(columns(source, source.read())) == ["old:input", "old:weight"]
    finally:
        source.detach()
