"""Known ways in which hooks of other tools break training, tried on an attached model: none may happen here."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8watch.capture.emulated import EmulatedSource
from fp8watch.capture.gradients import total_norm
from fp8watch.capture.scalars import NotAScalar, as_scalar
from fp8watch.capture.statistics import count
from fp8watch.capture.statistics.what_if import what_if_many
from fp8watch.emulation import DelayedScaling, convert
from fp8watch.emulation.region import autocast
from fp8watch.emulation.taps import all_taps, all_value_taps
from fp8watch.formats import E4M3

try:
    from float8_models import blocks
    from float8_models import train as train_float8
except ImportError:
    blocks = None


def make(depth: int = 3, width: int = 16, *, inplace: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU(inplace=inplace))]
    model = nn.Sequential(*layers)
    convert(model, DelayedScaling(amax_history_len=4))
    return model


def batch(seed: int, width: int = 16, rows: int = 8, factor: float = 1.0) -> torch.Tensor:
    return factor * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def counted(model: nn.Module, *runs: Any) -> dict[str, dict[str, float]]:
    """All observed columns by `module:tensor` of one step in which `runs` are called one after another."""
    source = EmulatedSource(model)
    try:
        source.begin(with_statistics=True)
        source.look_closer(None)
        for run in runs:
            run(model)
        reading = source.read()
        found: dict[str, dict[str, float]] = {}
        for name, values in reading.values.items():
            for column, value, ok in zip(
                source.columns(), values.tolist(), reading.validity(name).tolist(), strict=True
            ):
                if ok:
                    found.setdefault(column.name, {})[name] = value
        return found
    finally:
        source.detach()


@pytest.mark.parametrize("reentrant", [True, False])
def test_tied_parameters_under_checkpointing_count_once(reentrant):  # case: HOK-05
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.body, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor, *, saves: bool) -> torch.Tensor:
            def tail(x: torch.Tensor) -> torch.Tensor:
                return self.head(torch.tanh(self.body(x)))

            x = self.embed(tokens)
            return checkpoint(tail, x, use_reentrant=reentrant) if saves else tail(x)

    norms, seen = [], []
    for saves in (False, True):
        model = Tied()
        convert(model, DelayedScaling(amax_history_len=4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens = torch.arange(24).view(3, 8)
        seen.append(counted(model, lambda m, t=tokens, s=saves: m(t, saves=s).square().mean().backward()))
        norms.append(total_norm(optimizer))
        by_hand = torch.stack([p.grad.norm() for p in dict.fromkeys(model.parameters())]).norm()
        assert torch.allclose(norms[-1], by_hand)
    assert torch.equal(*norms)
    assert seen[0] == seen[1]
    assert len([name for name in seen[0] if name.endswith(":weight")]) == 2  # body, and the tied one under one name


@pytest.mark.parametrize("reentrant", [True, False])
def test_counts_are_those_of_the_run_without_checkpointing(reentrant):  # case: HOK-06
    class Stack(nn.Module):
        def __init__(self, *, saves: bool) -> None:
            super().__init__()
            self.parts, self.saves = make(), saves

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i in range(0, len(self.parts), 2):
                part = self.parts[i : i + 2]
                x = checkpoint(part, x, use_reentrant=reentrant) if self.saves else part(x)
            return x

    def run(model: nn.Module) -> None:
        x = batch(1, factor=600.0).requires_grad_()  # clips: scales are 1
        with autocast(model):
            output = model(x)
        output.square().mean().backward()

    plain = counted(Stack(saves=False), run)
    assert counted(Stack(saves=True), run) == plain
    assert plain["parts.0:input"]["saturated"] > 0
    assert plain["parts.0:input"]["quantized"] == 8 * 16


@pytest.mark.parametrize("framework", ["emulated", "torchao"])
@pytest.mark.parametrize("creates_graph", [False, True])
def test_no_activation_or_gradient_outlives_its_step(framework, creates_graph, monkeypatch):  # case: HOK-07
    inner: list[weakref.ref[torch.Tensor]] = []
    """Sources of casts inside the model."""
    on_values = EmulatedSource.on_values

    def noted(self: EmulatedSource, *args: Any, values: torch.Tensor, **options: Any) -> None:
        inner.append(weakref.ref(values))
        on_values(self, *args, values=values, **options)

    monkeypatch.setattr(EmulatedSource, "on_values", noted)
    if framework == "torchao":
        if blocks is None:
            pytest.skip("torchao is not installed")
        from fp8watch.capture.torchao.float8 import TorchaoSource

        model = blocks(num=2)
        source: Any = TorchaoSource(model)
    else:
        model = make(depth=10)
        source = EmulatedSource(model)

    def live() -> int:
        gc.collect()
        return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())

    gc.collect()
    gc.freeze()  # what is there already need not be walked through again
    try:
        sizes = []
        for step in range(8):
            source.begin(with_statistics=True)
            if step % 2:
                source.look_closer(None)
            x = batch(step)
            output = model(x)
            gradients: list[weakref.ref[torch.Tensor]] = []
            output.register_hook(lambda grad, kept=gradients: kept.append(weakref.ref(grad)))
            loss = output.square().sum()
            if creates_graph:
                # An emulated layer refuses what it would get wrong, and that must leave nothing behind either.
                with nullcontext() if framework == "torchao" else pytest.raises(RuntimeError, match="double backward"):
                    torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            else:
                loss.backward()
            kept = [weakref.ref(x), weakref.ref(output), *gradients]
            del x, output, loss
            source.read()
            model.zero_grad(set_to_none=True)
            sizes.append(live())
            assert all(ref() is None for ref in [*kept, *(ref for ref in inner if not _is_parameter(ref(), model))])
        assert (inner != []) is (framework == "emulated")
        assert sizes[3] == sizes[-1] == sizes[-3]
    finally:
        gc.unfreeze()
        source.detach()


def _is_parameter(tensor: torch.Tensor | None, model: nn.Module) -> bool:
    return tensor is not None and any(tensor is parameter for parameter in model.parameters())


def test_an_in_place_activation_after_a_watched_layer():  # case: HOK-08
    from fp8watch.capture.cost_meter import CostMeter
    from fp8watch.capture.shadow_probe import ShadowProbe

    def run(*, is_watched: bool) -> list[torch.Tensor]:
        model = make(inplace=True)
        source = EmulatedSource(model) if is_watched else None
        probe = ShadowProbe(dict(model.named_modules()), CostMeter(torch.device("cpu")))
        kept = []
        for step in range(3):
            if source is not None:
                source.begin(with_statistics=True)
                source.look_closer(None)
                assert probe.arm("0")
            output = model(batch(step))
            output.square().sum().backward()
            kept += [output.detach().clone(), *(p.grad.clone() for p in model.parameters())]
            if source is not None:
                source.read()
                found = probe.take()
                assert found is not None
                assert found[1] < 0.2  # compared before the activation wrote over it
        if source is not None:
            source.detach()
        return kept

    assert all(torch.equal(a, b) for a, b in zip(run(is_watched=True), run(is_watched=False), strict=True))


def test_a_watched_model_can_be_copied_pickled_and_saved():  # case: HOK-09
    model = make()
    keys = list(model.state_dict())
    source = EmulatedSource(model)
    try:
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        sent = pickle.loads(pickle.dumps(model))  # what spawn does
        assert list(model.state_dict()) == keys
        source.begin(with_statistics=True)
        for other in (twin, loaded, sent):
            other(batch(1, factor=1e6)).sum().backward()
        assert source.read() is None  # copies report nothing
        model(batch(2)).sum().backward()
        reading = source.read()
        assert reading.values["amax"].max() < 1e5
        assert reading.valid["amax"].all()
    finally:
        source.detach()


@pytest.mark.skipif(blocks is None, reason="torchao is not installed")
def test_a_copy_of_a_watched_compiled_model_can_be_watched_itself():  # case: HOK-09
    from fp8watch.capture.torchao.float8 import TorchaoSource

    model = blocks(num=1)
    first = TorchaoSource(model)
    twin = copy.deepcopy(model)
    second = TorchaoSource(twin)
    try:
        torch._dynamo.reset()
        run = torch.compile(twin, backend="aot_eager")
        for seed in range(2):
            for source in (first, second):
                source.begin(with_statistics=False)
            train_float8(run, seed)
            assert first.read() is None
            reading = second.read()
        assert reading is not None
        assert reading.valid["amax"].all()
    finally:
        first.detach()
        second.detach()


def test_listeners_do_not_pile_up():  # case: HOK-11
    model = make()
    for _ in range(20):
        source = EmulatedSource(model)
        try:
            source.begin(with_statistics=True)
            source.look_closer(None)
            source.begin(with_statistics=True)
            source.look_closer(None)
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            source.detach()
    assert list(all_taps()) == []
    assert list(all_value_taps()) == []
    assert not any(m._forward_hooks or m._forward_pre_hooks for name, m in model.named_modules() if name)


ODD = {
    "nan": torch.tensor([math.nan, 1.0]),
    "inf": torch.tensor([math.inf, -math.inf, 2.0]),
    "all nan": torch.full((4,), math.nan),
    "empty": torch.zeros(0, 3),
    "bool": torch.tensor([True, False]),
    "int8": torch.tensor([-128, 0, 127], dtype=torch.int8),
    "0-dim": torch.tensor(3.5),
}


@pytest.mark.parametrize("name", list(ODD))
def test_data_of_any_kind_is_counted_and_never_raises(name):  # case: HOK-13
    values = ODD[name]
    found = count(values, torch.tensor(1.0), E4M3)
    plain = values.double()
    assert found.quantized == values.numel()
    assert found.nonfinite == (~torch.isfinite(plain)).sum()
    assert found.zeros == (plain == 0).sum()
    finite = plain[torch.isfinite(plain)].abs().max().item() if torch.isfinite(plain).any() else 0.0
    assert found.amax == (math.inf if torch.isinf(plain).any() else finite)


def test_what_is_no_number_is_said():  # case: HOK-13
    with pytest.raises(NotAScalar, match="complex64"):
        as_scalar(torch.tensor(1j))
    with pytest.raises(NotAScalar, match="shape"):
        as_scalar(torch.zeros(0))
    assert what_if_many([]) == []


def test_a_module_in_two_places_is_one_and_its_calls_are_merged():  # case: HOK-21
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
            self.alias = self.first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.alias(2 * self.first(4 * self.first(x))))

    model = Shared()
    convert(model, DelayedScaling(amax_history_len=4))
    inputs: list[float] = []
    model.first.register_forward_pre_hook(lambda _, args: inputs.append(args[0].abs().max().item()))
    found = counted(model, lambda m: m(batch(0)).square().sum().backward())
    assert sorted({name.partition(":")[0] for name in found}) == ["first", "second"]
    assert len(inputs) == 3
    assert found["first:input"]["amax"] == pytest.approx(max(inputs))
    assert found["first:input"]["quantized"] == 3 * 8 * 16
    assert found["second:input"]["quantized"] == 8 * 16
    assert found["first:input"]["what_if_current_underflowed"] <= found["first:input"]["quantized"]


def test_frozen_parameters_are_expected_to_have_no_gradient():  # case: HOK-24
    torch.manual_seed(0)
    model = make()
    adapters = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.SGD([*model.parameters(), *adapters.parameters()], lr=0.1)

    def step(m: nn.Module) -> None:
        x = adapters[0](batch(0))
        F.mse_loss(adapters[1](m(x)), batch(1)).backward()

    found = counted(model, step)
    norm = total_norm(optimizer)
    assert torch.allclose(norm, torch.stack([p.grad.norm() for p in adapters.parameters()]).norm())
    assert found["0:grad_output"]["amax"] > 0  # the input's gradient is cast all the same
    for parameter in adapters.parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    counted(model, step)
    assert torch.allclose(total_norm(optimizer), torch.stack([p.grad.norm() for p in model.parameters()]).norm())
    for parameter in model.parameters():
        parameter.grad = None
    assert total_norm(optimizer) is None  # none at all: not observed, and not 0
