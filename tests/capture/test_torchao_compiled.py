"""torchao layers under torch.compile: the graph itself notes the numbers, and no graph break is added."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("torchao", reason="torchao is not installed")

from float8_models import RECIPES, batch, blocks, train
from torch._dynamo.testing import CompileCounterWithBackend

from fp8watch.capture.torchao.compiled import ATTRIBUTE
from fp8watch.capture.torchao.controls import TorchaoControls
from fp8watch.capture.torchao.float8 import TorchaoSource

# The compiler looks at .grad of whatever it traces.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(model: nn.Sequential, how: str, backend: object = "aot_eager") -> nn.Module:
    if how == "whole":
        return torch.compile(model, backend=backend)
    for block in model:  # in place, as torchtitan does: equal blocks share a graph
        block.compile(backend=backend)
    return model


def read(source: TorchaoSource, run: nn.Module, seeds: list[int]) -> dict[str, dict[str, float]]:
    source.begin(with_statistics=False)
    for seed in seeds:
        train(run, seed)
    reading = source.read()
    assert reading is not None
    names = [column.name for column in source.columns()]
    assert all(flags.all() for flags in reading.valid.values())
    return {key: dict(zip(names, values.tolist(), strict=True)) for key, values in reading.values.items()}


@pytest.mark.parametrize(("recipe", "how"), [("tensorwise", "whole"), ("rowwise", "blocks"), (RECIPES[2], "whole")])
def test_compiled_layers_show_what_eager_ones_do(recipe, how):
    plain, model = blocks(recipe), blocks(recipe)
    eager = TorchaoSource(plain)
    source = TorchaoSource(model)
    run = compiled(model, how)
    try:
        for seeds in ([1], [2, 3]):
            ours, theirs = read(source, run, seeds), read(eager, plain, seeds)
            for key in ("amax", "scale"):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-6)
            assert len(ours["amax"]) == 18
        assert {column.source for column in source.columns()} == {"measured"}
        assert source.not_observable() == []
    finally:
        eager.detach()
        source.detach()


@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_no_graph_and_no_graph_break_is_added(how):  # case: HOK-03
    frames = []
    for watched in (False, True):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        counter = CompileCounterWithBackend("aot_eager")
        model = blocks()
        source = TorchaoSource(model) if watched else None
        run = compiled(model, how, counter)
        outputs = []
        for seed in range(3):
            if source is not None:
                source.begin(with_statistics=seed == 1)
            outputs.append(train(run, seed).detach())
            if source is not None:
                assert source.read() is not None
        frames.append((counter.frame_count, sum(torch._dynamo.utils.counters["graph_break"].values()), outputs))
        if source is not None:
            source.detach()
    (bare, breaks, plain), (watched, watched_breaks, outputs) = frames
    assert (watched, watched_breaks) == (bare, breaks)
    assert breaks == 0
    assert all(torch.equal(a, b) for a, b in zip(plain, outputs, strict=True))


def test_attached_after_compilation_is_said_by_name():  # case: HOK-01
    model = blocks()
    run = compiled(model, "whole")
    train(run, 0)
    source = TorchaoSource(model)
    try:
        for seed in range(3):
            source.begin(with_statistics=False)
            train(run, seed)
            reading = source.read()
        if reading is None:  # the graph made before is used on
            assert list(source.columns()) == []
            assert len(source.not_observable()) == 6
            assert "attach first" in source.not_observable()[0]
        else:  # this version of the compiler traced it again
            assert len(source.columns()) == 18
            assert (reading.values["amax"] > 0).all()
    finally:
        source.detach()


def test_evaluation_of_a_compiled_model_is_no_step():
    model = blocks(num=1)
    source = TorchaoSource(model)
    run = compiled(model, "whole")
    try:
        before = read(source, run, [1])
        source.begin(with_statistics=False)
        train(run, 1)
        with torch.no_grad():
            run(batch(1, 1000.0))
        assert source.read().values["amax"].tolist() == list(before["amax"].values())
    finally:
        source.detach()


def test_a_step_without_the_layer_has_no_numbers():
    model = blocks()
    source = TorchaoSource(model)
    run = compiled(model, "blocks")
    try:
        read(source, run, [1])
        source.begin(with_statistics=False)
        train(run[:2], 1)
        reading = source.read()
        assert reading.valid["amax"].tolist() == [True] * 12 + [False] * 6
        assert reading.valid["scale"].tolist() == [True] * 12 + [False] * 6
    finally:
        source.detach()


def test_bf16_and_back_in_a_compiled_model_is_read_back():
    model = blocks(num=1)
    source, controls = TorchaoSource(model), TorchaoControls(model)
    run = compiled(model, "whole")
    layers = ["0.up", "0.down"]
    try:
        read(source, run, [1])
        assert controls.ran_high_precision(layers) == [False, False]
        controls.set_high_precision(["0.up"], high_precision=True)
        assert controls.ran_high_precision(layers) == [None, False]
        source.begin(with_statistics=False)
        train(run, 2)
        reading = source.read()
        assert controls.ran_high_precision(layers) == [True, False]
        assert reading.values["high_precision"].tolist() == [1, 1, 1] + [0] * 3
        assert reading.valid["scale"].tolist() == [False] * 3 + [True] * 3
        assert reading.valid["amax"].all()
        controls.set_high_precision(["0.up"], high_precision=False)
        assert not read(source, run, [3])["high_precision"]["0.up:input"]
        assert controls.ran_high_precision(layers) == [False, False]
    finally:
        source.detach()


def test_nothing_is_left_on_the_layers():
    model = blocks()
    state = list(model.state_dict())
    source = TorchaoSource(model)
    assert list(model.state_dict()) == state
    assert [name for name, _ in model.named_buffers()] == []
    source.detach()
    assert not any(hasattr(module, ATTRIBUTE) for module in model.modules())
    run = compiled(model, "whole")
    train(run, 0)


def test_second_watch_leaves_the_notes_of_the_first_alone():
    model = blocks(num=1)
    first = TorchaoSource(model)
    second = TorchaoSource(model)
    run = compiled(model, "whole")
    try:
        second.detach()
        assert len(read(first, run, [1])["amax"]) == 6
    finally:
        first.detach()


def test_training_goes_on_after_detach():
    model = blocks(num=1)
    source = TorchaoSource(model)
    run = compiled(model, "whole")
    read(source, run, [1])
    plain = train(run, 2).detach()
    source.detach()
    assert torch.equal(train(run, 2).detach(), plain)
