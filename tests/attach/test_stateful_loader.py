"""Loaders with a state of their own, as StatefulDataLoader: what making their iterators draws, and other numbers of
ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler

from fp8watch import rng
from fp8watch.checkpoints import elastic, manifest
from fp8watch.training.data import Batches

SAMPLES, BATCH = 48, 2


class Drawing:
    """Draws a seed for its workers whenever an iterator is made, and noise for each sample that it loads."""

    def __init__(self) -> None:
        self.seen = 0
        self._is_loaded = False

    def __iter__(self) -> Iterator[torch.Tensor]:
        torch.empty((), dtype=torch.int64).random_()
        random.random()
        np.random.rand()
        self.seen, self._is_loaded = self.seen if self._is_loaded else 0, False
        return self._rest()

    def _rest(self) -> Iterator[torch.Tensor]:
        while self.seen < 7:
            self.seen += 1
            yield torch.tensor([[float(self.seen)]])

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen, self._is_loaded = state["seen"], True


def go(batches: Any, count: int) -> list[tuple[float, float, float, float]]:
    """What each step gets, and draws for itself (dropout, say)."""
    found = []
    for _ in range(count):
        value = next(batches)
        found.append((value.item(), torch.rand(()).item(), random.random(), float(np.random.rand())))
    return found


def epochs(batches: Batches) -> Iterator[Any]:
    while True:
        yield from batches


@pytest.mark.parametrize("at", [0, 3, 7, 9])
@pytest.mark.parametrize("is_new_process", [False, True])
def test_steps_after_going_back_draw_what_they_drew_before(at: int, is_new_process: bool) -> None:
    """In the middle of an epoch, at its end, in the next one and before the first."""
    torch.manual_seed(3)
    batches = Batches(Drawing())
    loop = epochs(batches)
    go(loop, at)
    position, generators = batches.state_dict(), rng.snapshot()
    expected = go(loop, 10)
    if is_new_process:
        torch.manual_seed(77)
        batches = Batches(Drawing())
        loop = epochs(batches)
    batches.load_state_dict(position)
    rng.restore(generators)
    assert go(loop, 10) == expected


class Dealt:
    """A loader with a state of its own whose sampler deals samples out to ranks."""

    def __init__(self, rank: int, ranks: int) -> None:
        data: Any = range(SAMPLES)
        self.sampler = DistributedSampler(data, num_replicas=ranks, rank=rank, shuffle=True, seed=4)
        self.yielded = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        torch.empty((), dtype=torch.int64).random_()
        ids = list(self.sampler)
        for place in range(self.yielded * BATCH, len(ids), BATCH):
            self.yielded += 1
            yield torch.tensor(ids[place : place + BATCH])
        self.yielded = 0

    def state_dict(self) -> dict[str, int]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.yielded = state["yielded"]


def saved_by(ranks: int) -> manifest.Manifest:
    return manifest.Manifest(
        format_version=3, checkpoint="c", run="r", attempt=0, step=1, samples=0, data_position_included=True,
        time_unix=0.0, world_size=ranks, parts=[], absent={}, learning_rate=[], parameter_checksum="", rng_sha256="",
        files={}, versions={}, layout="replicas",
    )  # fmt: skip


# case: CKP-16
@pytest.mark.parametrize(("saved", "here"), [(2, 4), (4, 2), (2, 3)])
def test_samples_that_are_dealt_out_are_dealt_out_anew(saved: int, here: int) -> None:
    """Every sample of the epoch is seen, and hardly any twice."""
    positions, seen = [], []
    for rank in range(saved):
        loader = Dealt(rank, saved)
        loader.sampler.set_epoch(2)
        batches = Batches(loader)
        running = iter(batches)
        seen += [int(sample) for _ in range(4) for sample in next(running)]
        positions.append(batches.state_dict())
    later = []
    for rank in range(here):
        state = {"rng": {"host": rng.snapshot()}, "data": dict(positions[rank % saved])}
        (_, *notes) = elastic.adapt(state, saved_by(saved), rank, here)
        assert notes[-1].startswith("the epoch goes on after")
        batches = Batches(Dealt(rank, here))
        batches.load_state_dict(state["data"])
        torch.manual_seed(5)
        before = torch.get_rng_state()
        running = iter(batches)
        later += next(running).tolist()
        assert torch.equal(torch.get_rng_state(), before)
        later += [sample for batch in running for sample in batch.tolist()]
    assert set(seen) | set(later) == set(range(SAMPLES))
    assert len(set(seen) & set(later)) <= here * BATCH


@pytest.mark.parametrize(("here", "said"), [(4, "part of this epoch is never seen"), (1, "may be seen twice")])
def test_a_position_that_cannot_be_dealt_out_anew_is_said_as_it_is(here: int, said: str) -> None:
    """Whatever deals out the samples is hidden inside of the loader."""
    batches = Batches(Drawing())
    next(iter(batches))
    state = {"rng": {"host": rng.snapshot()}, "data": batches.state_dict()}
    notes = elastic.adapt(state, saved_by(2), 0, here)
    assert said in notes[-1]
    assert state["data"]["loader"] == {"seen": 1}
