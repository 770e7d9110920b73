from __future__ import annotations

import io
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from fp8watch.training.data import Batches


class Numbers(Dataset[torch.Tensor]):
    """Item i with noise from all three host generators; counts what was loaded."""

    def __init__(self, length: int = 20, *, noisy: bool = True) -> None:
        self.length = length
        self.noisy = noisy
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded.append(index)
        noise = torch.rand(()).item() + random.random() + float(np.random.rand()) if self.noisy else 0.0
        return torch.tensor([float(index), noise])


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(20):
            yield torch.tensor([float(index), torch.rand(()).item()])


class Rows:
    """Something that can be iterated again, shuffled by torch's generator."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in torch.randperm(7).tolist():
            yield torch.tensor([[float(index), torch.rand(()).item()]])


class Stateful:
    """What a StatefulDataLoader looks like from outside."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position < 7:
            self.position += 1
            yield torch.tensor([[float(self.position), 0.0]])
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


LOADERS: dict[str, Any] = {
    "in order": lambda: DataLoader(Numbers(), batch_size=3),
    "shuffled": lambda: DataLoader(Numbers(), batch_size=3, shuffle=True),
    "own generator": lambda: DataLoader(Numbers(), batch_size=3, shuffle=True, generator=generator()),
    "weighted": lambda: DataLoader(
        Numbers(), batch_size=3, sampler=WeightedRandomSampler([1.0] * 20, 20, generator=generator())
    ),
    "single samples": lambda: DataLoader(Numbers(), batch_size=None, shuffle=True),
    "iterable": lambda: DataLoader(Stream(), batch_size=3),
    "workers": lambda: DataLoader(Numbers(noisy=False), batch_size=3, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(
        Numbers(noisy=False), batch_size=3, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "again": Rows,
    "stateful": Stateful,
}


def seed() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


def generators() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def take(loader: Any, epochs: int) -> list[list[float]]:
    seen = []
    for _ in range(epochs):
        for batch in loader:
            seen.append(batch.flatten().tolist())
            torch.rand(1)  # the model's own draws, dropout say
    return seen


@pytest.mark.parametrize("kind", LOADERS)
def test_yields_and_draws_exactly_what_the_bare_loader_does(kind):
    seed()
    expected, after = take(LOADERS[kind](), 2), generators()
    seed()
    assert take(Batches(LOADERS[kind]()), 2) == expected
    assert generators() == after


def num_samples(kind: str, rows: list[list[float]]) -> int:
    """First dimensions added up: a loader that does not batch hands out what its dataset calls a batch."""
    return sum(len(row) // (1 if kind == "single samples" else 2) for row in rows)


def restored(state: dict[str, Any]) -> dict[str, Any]:
    """As after a checkpoint: nothing but tensors and plain values comes through."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(("saved_at", "back_at"), [(2, 4), (2, 9), (7, 8), (1, 1)])
def test_a_running_loop_follows_a_rollback(kind, saved_at, back_at):  # case: CKP-06
    """Save after `saved_at` batches, go back after `back_at`: from there all is as in a run that never went on."""
    from fp8watch import rng

    seed()
    expected = take(LOADERS[kind](), 2)
    seed()
    loader = LOADERS[kind]()
    batches = Batches(loader)
    seen: list[list[float]] = []
    state: dict[str, Any] | None = None
    went_back = False
    for _ in range(2):
        for batch in batches:
            seen.append(batch.flatten().tolist())
            torch.rand(1)
            if len(seen) == saved_at and state is None:
                state = restored({"data": batches.state_dict(), "rng": rng.snapshot()})
            if len(seen) == back_at and not went_back:
                went_back = True
                assert state is not None
                assert seen == expected[:back_at]
                rng.restore(state["rng"])
                batches.load_state_dict(state["data"])
                assert batches.samples == num_samples(kind, expected[:saved_at])
                del seen[saved_at:]
    assert seen == expected
    assert batches.samples == num_samples(kind, expected)


@pytest.mark.parametrize("kind", LOADERS)
def test_a_new_process_goes_on_where_the_checkpoint_was(kind):  # case: CKP-06
    from fp8watch import rng

    seed()
    expected = take(LOADERS[kind](), 2)
    seed()
    first = Batches(LOADERS[kind]())
    state: dict[str, Any] = {}
    for index, _ in enumerate(first):
        torch.rand(1)
        if index == 3:
            state = restored({"data": first.state_dict(), "rng": rng.snapshot()})
            break
    random.seed(99)
    torch.manual_seed(99)
    second = Batches(LOADERS[kind]())
    rng.restore(state["rng"])
    second.load_state_dict(state["data"])
    assert second.samples == first.samples  # the counter continues
    assert take(second, 2)[: len(expected) - 4] == expected[4:]


def test_skipped_batches_are_left_out_and_counted_in_samples():
    loader = DataLoader(Numbers(noisy=False), batch_size=3)
    batches = Batches(loader)
    running = iter(batches)
    next(running)
    state = batches.state_dict()
    next(running)
    batches.load_state_dict(state, skip_batches=2)
    assert next(running)[:, 0].tolist() == [9.0, 10.0, 11.0]
    assert (batches.samples, batches.skipped_samples) == (12, 6)


def test_skipping_runs_over_the_end_of_an_epoch():
    batches = Batches(DataLoader(Numbers(6, noisy=False), batch_size=3))
    running = iter(batches)
    next(running)
    batches.load_state_dict(batches.state_dict(), skip_batches=2)
    assert next(running)[:, 0].tolist() == [3.0, 4.0, 5.0]


def test_batches_before_the_position_are_not_loaded():
    data = Numbers(noisy=False)
    batches = Batches(DataLoader(data, batch_size=3))
    running = iter(batches)
    for _ in range(4):
        next(running)
    state = batches.state_dict()
    data.loaded.clear()
    batches.load_state_dict(state)
    next(running)
    assert data.loaded == [12, 13, 14]


def test_one_shot_iterators_say_that_they_cannot_be_rewound():
    batches = Batches(iter([torch.zeros(2)]))
    assert batches.unavailable is not None
    assert "only once" in batches.unavailable
    assert len(list(batches)) == 1
    with pytest.raises(ValueError, match="only once"):
        batches.load_state_dict({"epoch": 0, "index": 0, "samples": 0})


def test_a_loop_over_the_bare_loader_is_noticed():
    batches = Batches([torch.zeros(2)] * 3)
    batches.note_boundary()
    assert batches.unavailable is not None
    assert "watch.batches" in batches.unavailable
    list(batches)
    assert batches.unavailable is None


def test_what_is_no_position_is_refused():
    batches = Batches([torch.zeros(2)] * 3)
    with pytest.raises(ValueError, match="index"):
        batches.load_state_dict({"epoch": 0, "samples": 0})


def test_errors_of_the_dataset_come_through():
    class Broken(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise RuntimeError("bad shard")

    with pytest.raises(RuntimeError, match="bad shard"):
        next(iter(Batches(DataLoader(Broken()))))
