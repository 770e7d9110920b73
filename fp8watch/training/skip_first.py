"""A DataLoader's iterator that begins at a later batch, without loading the batches before it.

What is left out for good is told from what was seen before: it is counted, in batches and samples.

The loader's own sampler runs as always, so that it draws what it always draws; only what it hands out first is
thrown away before a dataset sees it. Datasets without indices (iterable ones) have to be consumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import IterableDataset


class _SkipFirst:
    """Stands in for a sampler during the making of one iterator, which then begins `seen` + `left_out` entries later.

    The entries are drawn when they are asked for, not when the iterator is made: a DataLoader draws its base seed
    in between, and the order of draws has to stay.
    """

    def __init__(self, sampler: Any, seen: int, left_out: int) -> None:
        self._sampler = sampler
        self._seen, self._left_out = seen, left_out
        self._entries: Iterator[Any] | None = None
        self.batches = self.samples = 0
        """What of `left_out` there was."""

    def __iter__(self) -> Iterator[Any]:
        self._entries = iter(self._sampler)
        return self

    def __next__(self) -> Any:
        self.skip()
        assert self._entries is not None
        return next(self._entries)

    def __len__(self) -> int:
        return len(self._sampler)

    def skip(self) -> None:
        """Throw the first entries away now; later calls do nothing."""
        (seen, self._seen), (left_out, self._left_out) = (self._seen, 0), (self._left_out, 0)
        assert self._entries is not None
        for _ in range(seen):
            if next(self._entries, _END) is _END:
                return
        for _ in range(left_out):
            entry = next(self._entries, _END)
            if entry is _END:
                return
            self.batches += 1
            self.samples += len(entry) if isinstance(entry, Sized) else 1


_END = object()


def hands_out_indices(loader: object) -> bool:
    """Whether batches can be left out, and their samples counted, by what the loader's sampler hands out alone."""
    if not isinstance(loader, torch.utils.data.DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    return loader.batch_sampler is not None  # without, an index may stand for a whole batch


def skipping(loader: torch.utils.data.DataLoader[Any], seen: int, left_out: int = 0) -> tuple[Iterator[Any], int, int]:
    """`iter(loader)` advanced by `seen` and `left_out` batches; of the latter, how many there were before the epoch's
    end, and their samples. `left_out` is for loaders that `hands_out_indices`."""
    if seen + left_out == 0:
        return iter(loader), 0, 0
    if isinstance(loader.dataset, IterableDataset):
        iterator = iter(loader)
        for _ in range(seen):
            next(iterator, None)
        return iterator, 0, 0
    attribute = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    sampler = getattr(loader, attribute)
    skip_first = _SkipFirst(sampler, seen, left_out)
    running = getattr(loader, "_iterator", None)
    if running is not None:
        # Persistent workers keep one iterator for life; it asks its own reference to the sampler.
        running._index_sampler = skip_first
    # DataLoader forbids to set the attribute, and every iterator takes it once, when it is made.
    vars(loader)[attribute] = skip_first
    try:
        iterator = iter(loader)
    finally:
        vars(loader)[attribute] = sampler
        if running is not None:
            running._index_sampler = sampler
    skip_first.skip()
    return iterator, skip_first.batches, skip_first.samples
