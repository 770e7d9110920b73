"""A DataLoader's iterator that begins at a later batch, without loading the batches before it.

What is left out for good is told from what was seen before: it is counted, in batches and samples.

The loader's own sampler runs as always, so that it draws what it always draws; only what it hands out first is
thrown away before a dataset sees it. Datasets without indices (iterable ones) have to be consumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import IterableDataset

from fp8watch.training import epoch_state


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
        assert self._entries is not None
        self.skip()
        return next(self._entries)

    def __len__(self) -> int:
        return len(self._sampler)

    def skip(self) -> bool:
        """Throw the first entries away now; later calls do nothing. False: nobody has asked for an iterator, as in a
        loader whose `__iter__` is a generator, and nothing was thrown away."""
        if self._entries is None:
            return False
        (seen, self._seen), (left_out, self._left_out) = (self._seen, 0), (self._left_out, 0)
        for _ in range(seen):
            if next(self._entries, _END) is _END:
                return True
        for _ in range(left_out):
            entry = next(self._entries, _END)
            if entry is _END:
                return True
            self.batches += 1
            self.samples += len(entry) if isinstance(entry, Sized) else 1
        return True

    def is_over(self) -> bool:
        """Whether there is nothing behind what is thrown away; the entry that there is else is lost."""
        return self.skip() and self._entries is not None and next(self._entries, _END) is _END


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
        return _consumed(iter(loader), seen), 0, 0
    if _would_start_workers_in_vain(loader, seen + left_out):
        before = epoch_state.take(loader)
        iterator, skip_first = _begun(loader, seen, left_out, {"num_workers": 0, "timeout": 0})
        if skip_first.is_over():
            return iter(()), skip_first.batches, skip_first.samples
        # The sampler has more than it says: with workers after all, and with the draws that this has made undone.
        epoch_state.restore(loader, epoch_state.generators(loader), before)
    iterator, skip_first = _begun(loader, seen, left_out)
    if not skip_first.skip():
        return _consumed(iterator, seen), 0, 0
    return iterator, skip_first.batches, skip_first.samples


def _would_start_workers_in_vain(loader: torch.utils.data.DataLoader[Any], batches: int) -> bool:
    """Whether an epoch ends within so many batches, so that its workers would end without one to load."""
    if loader.num_workers == 0 or loader.persistent_workers:
        return False
    sampler: Any = loader.batch_sampler
    try:
        return len(sampler) <= batches
    except Exception:  # it has none, or is somebody's own
        return False


def _begun(
    loader: torch.utils.data.DataLoader[Any], seen: int, left_out: int, more: Mapping[str, Any] | None = None
) -> tuple[Iterator[Any], _SkipFirst]:
    """A new iterator and what its sampler was for the time of its making; `more`: other attributes of that time."""
    attribute = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    sampler = getattr(loader, attribute)
    skip_first = _SkipFirst(sampler, seen, left_out)
    running = getattr(loader, "_iterator", None)
    if running is not None:
        # Persistent workers keep one iterator for life; it asks its own reference to the sampler.
        running._index_sampler = skip_first
    own, put = vars(loader), {attribute: skip_first, **(more or {})}
    before = {name: own[name] for name in put if name in own}
    # DataLoader forbids to set the attribute, and every iterator takes it once, when it is made.
    own |= put
    try:
        return iter(loader), skip_first
    finally:
        for name in put.keys() - before.keys():  # one that wraps another loader has none of its own
            del own[name]
        own |= before
        if running is not None:
            running._index_sampler = sampler


def _consumed(iterator: Iterator[Any], batches: int) -> Iterator[Any]:
    """The iterator after so many batches, which are loaded."""
    for _ in range(batches):
        next(iterator, None)
    return iterator
