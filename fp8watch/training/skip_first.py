"""Makes a DataLoader's iterator begin at a later batch, without loading the batches before it.

The loader's own sampler runs as usual, so it makes the same random draws; its first entries are discarded before the
dataset gets them. An `IterableDataset` has no indices and has to be consumed.

`seen` batches were trained on before. `left_out` batches are skipped for good and counted, in batches and samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import IterableDataset

from fp8watch.training import epoch_state


class _SkipFirst:
    """Replaces a sampler while one iterator is made, which then begins `seen` + `left_out` entries later.

    Entries are discarded by `skip` or at the first access, not in `__iter__`: a DataLoader draws its base seed in
    between, and the order of random draws must not change.
    """

    def __init__(self, sampler: Any, seen: int, left_out: int) -> None:
        self._sampler = sampler
        self._seen, self._left_out = seen, left_out
        self._entries: Iterator[Any] | None = None
        self.batches = self.samples = 0
        """How much of `left_out` the sampler had."""

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
        """Discard the first entries; later calls do nothing. False: nothing was discarded, because the loader has not
        called `iter` on the sampler yet (its `__iter__` may be a generator)."""
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
        """Whether no entry follows the discarded ones. If one does, it is lost."""
        return self.skip() and self._entries is not None and next(self._entries, _END) is _END


_END = object()


def hands_out_indices(loader: object) -> bool:
    """Whether batches can be skipped, and their samples counted, with the loader's sampler alone."""
    if not isinstance(loader, torch.utils.data.DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    return loader.batch_sampler is not None  # without one, an index may stand for a whole batch


def skipping(loader: torch.utils.data.DataLoader[Any], seen: int, left_out: int = 0) -> tuple[Iterator[Any], int, int]:
    """`iter(loader)` advanced by `seen` + `left_out` batches, with the number of `left_out` batches before the epoch's
    end and of their samples. `left_out` must be 0 unless `hands_out_indices(loader)`."""
    if seen + left_out == 0:
        return iter(loader), 0, 0
    if isinstance(loader.dataset, IterableDataset):
        return _consumed(iter(loader), seen), 0, 0
    if _would_start_workers_in_vain(loader, seen + left_out):
        before = epoch_state.capture(loader)
        iterator, skip_first = _begun(loader, seen, left_out, {"num_workers": 0, "timeout": 0})
        if skip_first.is_over():
            return iter(()), skip_first.batches, skip_first.samples
        # The sampler yields more than its length. Undo the random draws, and start the workers after all.
        epoch_state.restore(loader, epoch_state.generators(loader), before)
    iterator, skip_first = _begun(loader, seen, left_out)
    if not skip_first.skip():
        return _consumed(iterator, seen), 0, 0
    return iterator, skip_first.batches, skip_first.samples


def _would_start_workers_in_vain(loader: torch.utils.data.DataLoader[Any], batches: int) -> bool:
    """Whether the epoch ends within `batches` batches, so that its workers would have nothing to load."""
    if loader.num_workers == 0 or loader.persistent_workers:
        return False
    sampler: Any = loader.batch_sampler
    try:
        return len(sampler) <= batches
    except Exception:  # the sampler has no length, or a custom one that raises
        return False


def _begun(
    loader: torch.utils.data.DataLoader[Any], seen: int, left_out: int, more: Mapping[str, Any] | None = None
) -> tuple[Iterator[Any], _SkipFirst]:
    """A new iterator, and the sampler it was made with. `more`: further attributes to set while it is made."""
    attribute = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    sampler = getattr(loader, attribute)
    skip_first = _SkipFirst(sampler, seen, left_out)
    running = getattr(loader, "_iterator", None)
    if running is not None:
        # With persistent workers there is one iterator for all epochs, with its own reference to the sampler.
        running._index_sampler = skip_first
    own, put = vars(loader), {attribute: skip_first, **(more or {})}
    before = {name: own[name] for name in put if name in own}
    # Through `vars`, because DataLoader forbids setting the attribute. An iterator reads it only when it is made.
    own |= put
    try:
        return iter(loader), skip_first
    finally:
        for name in put.keys() - before.keys():  # a loader that wraps another one has no such attribute itself
            del own[name]
        own |= before
        if running is not None:
            running._index_sampler = sampler


def _consumed(iterator: Iterator[Any], batches: int) -> Iterator[Any]:
    """The iterator advanced by `batches` batches, which are loaded."""
    for _ in range(batches):
        next(iterator, None)
    return iterator
