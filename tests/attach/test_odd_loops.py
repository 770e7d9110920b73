"""Loops that use one loader several times at once, odd batches and odd scalars: training sees no difference."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fp8watch
from fp8watch.records import Layout, StepFrame
from fp8watch.training.data import Batches


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(12.0)), batch_size=2, shuffle=True)


def zipped(loader: Any) -> list[list[float]]:
    return [a[0].tolist() + b[0].tolist() for _ in range(2) for a, b in zip(loader, loader, strict=True)]


def with_a_peek(loader: Any) -> list[list[float]]:
    seen = []
    for _ in range(2):
        for i, batch in enumerate(loader):
            seen.append(batch[0].tolist())
            if i == 2:
                seen.append(next(iter(loader))[0].tolist())
    return seen


def with_an_evaluation(loader: Any) -> list[list[float]]:
    seen = []
    for i, batch in enumerate(loader):
        seen.append(batch[0].tolist())
        if i in (1, 5):
            seen += [inner[0].tolist() for inner in loader]
    return seen


def begun_anew(loader: Any) -> list[list[float]]:
    running = iter(loader)
    seen = [next(running)[0].tolist() for _ in range(2)]
    running = iter(loader)
    return seen + [batch[0].tolist() for batch in running]


LOOPS = [zipped, with_a_peek, with_an_evaluation, begun_anew]


@pytest.mark.parametrize("loop", LOOPS)
def test_iterations_at_once_are_those_of_the_bare_loader(loop):
    torch.manual_seed(4)
    expected, after = loop(loader()), torch.get_rng_state()
    torch.manual_seed(4)
    assert loop(Batches(loader())) == expected
    assert torch.equal(torch.get_rng_state(), after)


def test_the_position_is_that_of_the_outer_loop():
    batches = Batches(DataLoader(TensorDataset(torch.arange(12.0)), batch_size=2))
    outer = iter(batches)
    next(outer)
    inner = iter(batches)
    assert [float(next(inner)[0][0]) for _ in range(3)] == [0.0, 2.0, 4.0]
    state = batches.state_dict()
    assert (state["index"], batches.samples) == (1, 2)
    next(outer)
    batches.load_state_dict(state)
    assert float(next(inner)[0][0]) == 6.0
    assert float(next(outer)[0][0]) == 2.0
    assert batches.remark is not None


def test_a_loop_that_was_dropped_hands_the_position_on():
    batches = Batches(DataLoader(TensorDataset(torch.arange(12.0)), batch_size=2))
    first = iter(batches)
    next(first)
    second = iter(batches)
    del first
    next(second)
    state = batches.state_dict()
    next(second)
    batches.load_state_dict(state)
    assert float(next(second)[0][0]) == 2.0
    assert batches.samples == 6


def test_a_loader_with_a_state_of_its_own_cannot_be_put_back_while_it_is_iterated_twice():
    class Stateful:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.zeros(3, 2))

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    batches = Batches(Stateful())
    outer = iter(batches)
    inner = iter(batches)
    assert batches.unavailable is not None
    assert len(list(outer)) == len(list(inner)) == 3
    next(iter(batches))
    assert batches.unavailable is None


def test_iterating_twice_is_said_once(trainer, channel, caplog):
    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    data = loader()
    for _ in zip(watch.batches(data), watch.batches(data), strict=True):
        watch.step(1.0)
    assert caplog.text.count("position of the first") == 1


class Lazy(Mapping[str, Any]):
    """Says in its own way that it has no such field, and that it is broken."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields

    def __getitem__(self, key: str) -> Any:
        if key not in self.fields:
            raise RuntimeError(f"no field {key}")
        if self.fields[key] is None:
            raise OSError("bad shard")
        return self.fields[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_batches_of_any_kind_are_counted_where_possible(trainer, channel):
    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    nested = torch.nested.nested_tensor([torch.zeros(3, 4), torch.zeros(5, 4)])
    data = [(nested, 1), Lazy({"x": torch.zeros(4, 3, dtype=torch.int64)})]
    for _ in watch.batches(data):
        watch.step(1.0)
    first, second = channel().of(StepFrame)
    assert first.scalars["samples"] == 2.0
    assert (second.scalars["samples"], second.scalars["tokens"]) == (6.0, 12.0)


def test_what_cannot_be_counted_is_not_observed_and_training_goes_on(trainer, channel, caplog):
    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    data = [Lazy({"input": None})] * 4
    assert sum(1 for _ in iter(watch.batches(data)) if watch.step(1.0) is None) == 4
    frames = channel().of(StepFrame)
    assert all(not {"samples", "tokens"} & frame.scalars.keys() for frame in frames)
    assert {text.partition(":")[0] for text in watch.not_observable} >= {"samples", "tokens"}
    assert caplog.text.count("samples not observed") == 1


class Bad:
    def __float__(self) -> float:
        raise RuntimeError("no number")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["loss", "tokens"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: "many",
        lambda: [1],
        Bad,
        lambda: 10**400,
        lambda: torch.ones(1).to_sparse(),
        lambda: torch.ones(2),
        lambda: torch.nested.nested_tensor([torch.ones(1)]),
        lambda: torch.quantize_per_tensor(torch.ones(1), 0.1, 0, torch.qint8),
    ],
    ids=["text", "list", "raises", "huge", "sparse", "vector", "nested", "quantized"],
)
def test_a_bad_scalar_costs_nothing_but_itself(trainer, channel, caplog, name, make):
    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    other = "tokens" if name == "loss" else "loss"
    for _ in range(5):
        watch.step(**{name: make(), other: 7.0})
    watch.step(2.0, 3)
    frames = channel().of(StepFrame)
    assert [frame.scalars.get(name) is None for frame in frames] == [True] * 5 + [False]
    assert [frame.scalars[other] for frame in frames[:5]] == [7.0] * 5
    assert watch.failures == {}
    assert caplog.text.count(f"{name} not observed") == 1
    assert any(text.startswith(f"{name}: ") for text in watch.not_observable)


def test_a_tensor_that_cannot_be_copied_does_not_cost_the_step(trainer, channel):
    class Odd(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.cat:
                raise NotImplementedError("cat")
            return super().__torch_function__(function, types, args, kwargs or {})

    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    for _ in range(4):
        watch.step(torch.ones(()).as_subclass(Odd), tokens=5)
    frames = channel().of(StepFrame)
    assert [frame.scalars["tokens"] for frame in frames] == [5.0] * 4
    assert any(text.startswith("loss: ") for text in watch.not_observable)


def test_tokens_on_a_device_are_not_waited_for(trainer, channel, monkeypatch):
    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    tokens = torch.tensor(5)

    def waits(self: torch.Tensor) -> float:
        raise AssertionError("a device was waited for")

    with monkeypatch.context() as patch:
        for name in ("__float__", "__int__", "__bool__", "item", "tolist"):
            patch.setattr(torch.Tensor, name, waits)
        watch.step(1.0, tokens)
    assert watch.failures == {}
    assert channel().of(StepFrame)[-1].scalars["tokens"] == 5.0


def test_bad_calls_switch_nothing_off(trainer, channel):
    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    for _ in range(5):
        watch.look_closer(None)  # type: ignore[arg-type]
        watch.look_closer([1, None, "no such layer"])  # type: ignore[list-item]
        watch.evaluation(None)  # type: ignore[arg-type]
        watch.record(typo=1.0, attention_logit_max="x", kurtosis=3.0)
        watch.step(1.0)
    assert watch.failures == {}
    assert channel().of(StepFrame)[-1].scalars["kurtosis"] == 3.0


@pytest.mark.parametrize(
    ("where", "part"),
    [
        ("fp8watch.training.recorder.Recorder.finish", "capture"),
        ("fp8watch.capture.emulated.EmulatedSource.columns", "layout"),
        ("fp8watch.capture.emulated.EmulatedSource.read", "emulation read"),
    ],
)
def test_a_part_that_is_off_is_said_in_the_layout(trainer, channel, monkeypatch, where, part):
    watch = fp8watch.attach(trainer.model, trainer.optimizer)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("unknown FP8 state")

    monkeypatch.setattr(where, fail)
    trainer.steps(watch, 5)
    (text,) = [text for text in watch.not_observable if text.startswith(f"{part}: off")]
    assert "unknown FP8 state" in text
    assert text in channel().of(Layout)[-1].not_observable


def test_loaders_that_no_loop_iterates_are_let_go(trainer, channel):
    class Rows(list[torch.Tensor]):
        pass

    watch = fp8watch.attach(trainer.model, trainer.optimizer)
    seen = []
    for _ in range(20):
        rows = Rows([torch.zeros(2, 3, dtype=torch.int64)])
        seen.append(weakref.ref(rows))
        for _ in watch.batches(rows):
            watch.step(1.0)
    del rows
    gc.collect()
    assert sum(ref() is not None for ref in seen) <= 2  # the one of rollbacks and the newest
    assert [frame.scalars["tokens"] for frame in channel().of(StepFrame)] == [6.0] * 20
