"""A DataLoader's iterator that begins at a later batch, without loading the batches before it.

The loader's own sampler runs as always, so that it draws what it always draws; only what it hands out first is
thrown away before a dataset sees it. Datasets without indices (iterable ones) have to be consumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset


class _SkipFirst:
    """Stands in for a sampler during the making of one iterator, which then begins `count` entries later.

    The entries are drawn when they are asked for, not when the iterator is made: a DataLoader draws its base seed
    in between, and the order of draws has to stay.
    """

    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler = sampler
        self._count = count
        self._entries: Iterator[Any] | None = None

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
        count, self._count = self._count, 0
        assert self._entries is not None
        for _ in range(count):
            if next(self._entries, _END) is _END:
                return


_END = object()


def skipping(loader: torch.utils.data.DataLoader[Any], count: int) -> Iterator[Any]:
    """`iter(loader)` advanced by `count` batches."""
    if count == 0:
        return iter(loader)
    if isinstance(loader.dataset, IterableDataset):
        iterator = iter(loader)
        for _ in range(count):
            next(iterator, None)
        return iterator
    attribute = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    sampler = getattr(loader, attribute)
    skip_first = _SkipFirst(sampler, count)
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
    return iterator
