"""A window of batches to leave out that is longer than epochs: what is yielded, what is drawn, and who is started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from fp8watch.training.data import Batches

EPOCH = 4
"""Batches."""


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 2 * EPOCH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


class Started:
    """Leaves a file for each worker that is started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, worker: int) -> None:
        number = len(list(self.folder.iterdir()))
        (self.folder / f"{number}-{torch.initial_seed()}").touch()

    def count(self) -> int:
        return len(list(self.folder.iterdir()))


class Short(BatchSampler):
    """Says that it has fewer batches than it has."""

    def __len__(self) -> int:
        return 1


class Lazy(DataLoader[torch.Tensor]):
    """As loaders of other libraries do it: nothing is begun before the first batch is asked for."""

    def __iter__(self) -> Iterator[torch.Tensor]:  # type: ignore[override]
        yield from super().__iter__()


class Wrapping(DataLoader[torch.Tensor]):
    """The loader that it wraps has all attributes; it has none."""

    def __init__(self, inner: DataLoader[torch.Tensor]) -> None:
        self.__dict__["inner"] = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def __iter__(self) -> Iterator[torch.Tensor]:  # type: ignore[override]
        return iter(self.inner)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


MAKE: dict[str, Any] = {
    "global generator": lambda **more: DataLoader(Rows(), batch_size=2, shuffle=True, **more),
    "own generator": lambda **more: DataLoader(Rows(), batch_size=2, shuffle=True, generator=generator(), **more),
    "lying": lambda **more: DataLoader(Rows(), batch_sampler=Short(RandomSampler(Rows()), 2, False), **more),
    "lazy": lambda **more: Lazy(Rows(), batch_size=2, shuffle=True, **more),
    "wrapping": lambda **more: Wrapping(DataLoader(Rows(), batch_size=2, shuffle=True, **more)),
}  # fmt: skip


def whole(kind: str, epochs: int, **more: Any) -> list[list[float]]:
    torch.manual_seed(3)
    loader = MAKE[kind](**more)
    return [batch.tolist() for _ in range(epochs) for batch in loader]


def without(loader: Any, skipped: int, epochs: int) -> tuple[Batches, list[list[float]]]:
    """The batches of a run that is put back to where the second batch was yielded, without the `skipped` next ones."""
    torch.manual_seed(3)
    batches = Batches(loader)
    seen, is_back = [], False
    for _ in range(epochs):
        for batch in batches:
            seen.append(batch.tolist())
            if len(seen) == 2 and not is_back:
                is_back = True
                batches.load_state_dict(batches.state_dict(), skip_batches=skipped)
    return batches, seen


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("skipped", [1, 2, 5, 6, 9, 10, 14])
def test_what_follows_a_window_over_several_epochs_is_what_would_have_followed_it(
    kind: str, skipped: int, workers: int
) -> None:
    expected = whole(kind, 5, num_workers=workers)
    batches, seen = without(MAKE[kind](num_workers=workers), skipped, 5)
    if kind in ("global generator", "own generator", "lying"):
        assert seen[:2] == expected[:2]
        following = expected[2 + skipped :]
        assert seen[2 : 2 + len(following)] == following
    assert batches.skipped_samples == 2 * skipped
    assert batches.samples == 2 * (skipped + len(seen))


def test_epochs_that_are_left_out_start_no_worker(tmp_path: Path) -> None:
    started = Started(tmp_path)
    loader = DataLoader(Rows(), batch_size=2, shuffle=True, num_workers=1, worker_init_fn=started, timeout=60)
    torch.manual_seed(3)
    batches = Batches(loader)
    running = iter(batches)
    next(running)
    assert started.count() == 1
    batches.load_state_dict(batches.state_dict(), skip_batches=10 * EPOCH)
    next(running)
    assert batches.skipped_samples == 20 * EPOCH
    assert started.count() == 2, "those of the epoch that goes on, and no others"
    assert (loader.num_workers, loader.timeout) == (1, 60)


def test_workers_are_seeded_as_without_the_short_cut(tmp_path: Path) -> None:
    """Their base seed is drawn between the sampler's draws of one epoch and of the next."""
    seeds = []
    for name, skipped in (("whole", 0), ("skipped", 3 * EPOCH)):
        (tmp_path / name).mkdir()
        started = Started(tmp_path / name)
        loader = DataLoader(Rows(), batch_size=2, shuffle=True, num_workers=1, worker_init_fn=started)
        if skipped:
            without(loader, skipped, 2)
        else:
            torch.manual_seed(3)
            for _ in range(5):
                list(loader)
        seeds.append([path.name.partition("-")[2] for path in sorted((tmp_path / name).iterdir())])
    plain, short = seeds
    # Those of epochs 0 and 3, in the middle of both of which it was.
    assert short[:2] == [plain[0], plain[3]]
