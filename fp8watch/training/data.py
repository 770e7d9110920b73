"""`watch.batches(loader)`: yields exactly what the bare loader yields, and can be rewound to an earlier position.

Three kinds of loader can be rewound: one with `state_dict` and `load_state_dict` (StatefulDataLoader), a plain
`DataLoader`, and anything that can be iterated again. For the latter two, the position is the state of the random
generators at the start of the epoch and the number of batches since. To rewind, a new iterator is made with those
generator states, and the batches before the position are skipped; they are not loaded if a sampler yields indices.
Iterators that can be consumed only once, and loaders whose attributes raise errors, cannot be rewound. They are
iterated unchanged, and the user is told.

A rollback takes effect in the running `for` loop: its next batch is the one at the restored position. Random draws in
the main process are replayed exactly, random augmentation inside worker processes is not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from fp8watch import rng
from fp8watch.training import epoch_state
from fp8watch.training.batch_size import count_samples, count_tokens
from fp8watch.training.skip_first import hands_out_indices, skipping

ONE_SHOT = "the loader can be iterated only once ({type}); give a DataLoader or something that can be iterated again"
HIDDEN = "not observable: {type} raises {error} when it is inspected; its batches are passed on unchanged"
BYPASSED = "the loop does not take its batches from watch.batches(loader)"
APART = (
    "a loader with state_dict is iterated a second time while an iteration is under way: its state is not the loop's"
)
SHARED = (
    "batches: a loader is iterated again while an iteration over it is under way; a rollback restores the position "
    "of the first"
)

State = dict[str, Any]


class _Cursor(Iterator[Any]):
    """One iteration over a loader. It refers to its `Batches`, which has only a weak reference back: the iteration ends
    with the loop."""

    def __init__(self, batches: Batches, iterator: Iterator[Any] | None, epoch_state: State) -> None:
        self._batches = batches
        self.iterator = iterator
        """The loader's own iterator; None: one has to be made at a restored position."""
        self.epoch_state = epoch_state
        self.index = 0
        self.samples = 0
        self.is_over = False
        self.leads = False
        """Whether the position of the `Batches` is that of this iteration."""
        self.target = -1
        """The epoch at whose end a leading iteration stops."""

    def __next__(self) -> Any:
        return self._batches._next(self)


class Batches:
    """A rewindable view of a loader. `samples` and `skipped_samples` count from the start of training.

    The position is that of the leading iteration, the oldest one that is running. An iteration that begins meanwhile
    (to look at a sample, to evaluate on the same loader, for `zip`) is independent of it, as with the bare loader.
    """

    def __init__(self, loader: Iterable[Any], on_batch: Callable[[Any], None] | None = None) -> None:
        self.loader = loader
        self._on_batch = on_batch
        self._cursors: list[weakref.ref[_Cursor]] = []
        self._epoch = -1
        self._index = 0
        self._epoch_state: State = {}
        self._pending: tuple[State, int] | None = None
        self._tokens: int | None = None
        self._is_token_count_whole = True
        self.uncounted: dict[str, str] = {}
        """`samples` or `tokens` -> why those of a batch could not be counted."""
        self.remark: str | None = None
        """Message to the user about how the loader is used."""
        self.samples = 0
        """Position in the stream of samples: all that were yielded or skipped."""
        self.skipped_samples = 0
        """The part of `samples` that was skipped by `load_state_dict(..., skip_batches=)`."""
        self.unavailable: str | None = None
        """Why the position cannot be saved or restored; None: it can be."""
        self._is_stateful = self._is_hidden = False
        try:
            self._is_stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
            if isinstance(loader, Iterator) and not self._is_stateful:
                self.unavailable = ONE_SHOT.format(type=type(loader).__name__)
        except Exception as error:
            self._hide(error)

    def _hide(self, error: Exception) -> None:
        """Stop inspecting the loader, because that raises errors, as it may for a proxy of another library."""
        self._is_hidden, self._is_stateful = True, False
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self.unavailable = HIDDEN.format(type=type(self.loader).__name__, error=reason)
        self.remark = f"data position {self.unavailable}"

    def __iter__(self) -> Iterator[Any]:
        """Start an epoch as the bare loader does; after `load_state_dict`, the rest of the restored epoch."""
        if self.unavailable is BYPASSED:
            self.unavailable = None
        if self._lead() is not None:
            self.remark = SHARED
            if self._is_stateful and self.unavailable is None:
                self.unavailable = APART  # the loader's state is that of its newest iterator
            cursor = _Cursor(self, *self._begun())
        else:
            iterator = self._start_epoch() if self._pending is None else None
            cursor = _Cursor(self, iterator, self._epoch_state)
            cursor.leads, cursor.target = True, self._epoch
        self._cursors.append(weakref.ref(cursor))
        return cursor

    def __len__(self) -> int:
        """Batches per epoch. Raises `TypeError` if the loader has no length."""
        return len(self.loader)  # type: ignore[arg-type]

    def _lead(self) -> _Cursor | None:
        """The leading iteration: the oldest that is neither over nor deleted."""
        under_way = [cursor for ref in self._cursors if (cursor := ref()) is not None and not cursor.is_over]
        if len(under_way) != len(self._cursors):
            self._cursors = [weakref.ref(cursor) for cursor in under_way]
        if not under_way:
            return None
        lead = under_way[0]
        if not lead.leads:
            lead.leads = True
            if self._pending is None:
                self._epoch += 1
                self._index, self._epoch_state = lead.index, lead.epoch_state
                self.samples += lead.samples
            lead.target = self._epoch
            if self.unavailable is APART and len(under_way) == 1:
                self.unavailable = None
        return lead

    def _next(self, cursor: _Cursor) -> Any:
        if cursor.is_over:
            raise StopIteration
        if self._lead() is cursor:
            return self._next_of_lead(cursor)
        assert cursor.iterator is not None
        try:
            batch = next(cursor.iterator)
        except StopIteration:
            cursor.is_over, cursor.iterator = True, None
            raise
        cursor.index += 1
        cursor.samples += self._count("samples", count_samples, batch) or 0
        return batch

    def _next_of_lead(self, cursor: _Cursor) -> Any:
        while True:
            if self._pending is not None:
                cursor.iterator = self._reposition()
                cursor.target = max(cursor.target, self._epoch)
            assert cursor.iterator is not None
            try:
                batch = next(cursor.iterator)
            except StopIteration:
                # A rollback went back over the end of an epoch, so this loop also has to run the epochs in between.
                if self._epoch < cursor.target:
                    cursor.iterator = self._start_epoch()
                    continue
                cursor.is_over, cursor.iterator = True, None
                raise
            self._index += 1
            self.samples += self._count("samples", count_samples, batch) or 0
            tokens = self._count("tokens", count_tokens, batch)
            if tokens is not None:
                self._tokens = (self._tokens or 0) + tokens
            if self._on_batch is not None:
                self._on_batch(batch)
            return batch

    def _count(self, name: str, count: Callable[[Any], int | None], batch: Any) -> int | None:
        """Count without raising: a dataset's batches may be of any class, with methods that raise."""
        try:
            return count(batch)
        except Exception as error:
            self.uncounted.setdefault(name, f"a batch ({type(batch).__name__}) raises {type(error).__name__}")
            if name == "tokens":
                self._is_token_count_whole = False
            return None

    def take_tokens(self) -> int | None:
        """Tokens yielded since the last call; None if there were none (no batch, or no integer tensor), or if not all
        could be counted (see `uncounted`)."""
        tokens, self._tokens = self._tokens, None
        is_whole, self._is_token_count_whole = self._is_token_count_whole, True
        return tokens if is_whole else None

    def note_boundary(self) -> None:
        """Called at a step boundary. If no batch was taken from here by then, the loop uses the bare loader."""
        if self._epoch < 0 and self._pending is None and self.unavailable is None:
            self.unavailable = BYPASSED

    def _start_epoch(self) -> Iterator[Any]:
        self._note_epoch()
        iterator, self._epoch_state = self._begun()
        return iterator

    def _note_epoch(self) -> None:
        self._epoch += 1
        self._index = 0
        if self.unavailable is APART:
            self.unavailable = None

    def _begun(self) -> tuple[Iterator[Any], State]:
        """A new iterator of the loader, and the state before it was made."""
        state = self._state_before()
        return iter(self.loader), state

    def _state_before(self) -> State:
        if self._is_hidden:
            return {}
        try:
            return epoch_state.sampler_epoch_of(self.loader) if self._is_stateful else epoch_state.capture(self.loader)
        except Exception as error:
            self._hide(error)
            return {}

    def state_dict(self) -> State:
        """The position after the last batch yielded, as tensors and plain values."""
        if self._pending is not None:
            state, skip = self._pending
            if skip == 0:
                return state
        state = {
            "epoch": self._epoch,
            "index": self._index,
            "samples": self.samples,
            "skipped_samples": self.skipped_samples,
            "epoch_state": self._epoch_state,
        }
        if self._is_stateful and self._epoch >= 0:
            state["loader"] = self.loader.state_dict()  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state: State, skip_batches: int = 0) -> None:
        """Return to a position and skip `skip_batches` batches after it. Takes effect at the next batch.

        Raises `ValueError` if the loader cannot be rewound or `state` is not a position.
        """
        if self.unavailable is not None:
            raise ValueError(self.unavailable)
        missing = {"epoch", "index", "samples"} - state.keys()
        if missing:
            raise ValueError(f"no data position: {', '.join(sorted(missing))} missing")
        self._pending = (state, skip_batches)
        self.samples = int(state["samples"])
        self.skipped_samples = int(state.get("skipped_samples", 0))
        self._tokens = None

    def _reposition(self) -> Iterator[Any]:
        assert self._pending is not None
        (state, skip_batches), self._pending = self._pending, None
        self._epoch, self._index = int(state["epoch"]), int(state["index"])
        self._epoch_state = state.get("epoch_state", {})
        if self._epoch < 0:
            iterator, skip_batches = self._start_later(skip_batches)
        elif self._is_stateful:
            iterator = self._reloaded(state)
        else:
            iterator, skip_batches = self._replayed(skip_batches)
        return self._leave_out(iterator, skip_batches)

    def _reloaded(self, state: State) -> Iterator[Any]:
        """The iterator of a loader with `load_state_dict`. Without its state (saved with another number of ranks), the
        epoch is started again and the batches seen are consumed. The process's random generators stay unchanged."""
        now = rng.snapshot()
        try:
            if "loader" in state:
                self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
                return iter(self.loader)
            epoch_state.set_sampler_epoch(self.loader, self._epoch_state)
            iterator = iter(self.loader)
            for _ in range(self._index):
                next(iterator, None)
            return iterator
        finally:
            rng.restore(now)

    def _start_later(self, skip_batches: int) -> tuple[Iterator[Any], int]:
        """A new epoch without its first batches, and the number of batches still to be skipped."""
        if not hands_out_indices(self.loader) or self._is_stateful or self._is_hidden:
            return self._start_epoch(), skip_batches
        self._note_epoch()
        self._epoch_state = self._state_before()
        return self._skipped(0, skip_batches)

    def _skipped(self, seen: int, skip_batches: int) -> tuple[Iterator[Any], int]:
        iterator, batches, samples = skipping(self.loader, seen, skip_batches)  # type: ignore[arg-type]
        self._index += batches
        self.samples += samples
        self.skipped_samples += samples
        return iterator, skip_batches - batches

    def _replayed(self, skip_batches: int) -> tuple[Iterator[Any], int]:
        """A new iterator of the epoch at `self._index`, or later if batches can be skipped without being read, and the
        number of batches still to be skipped. The process's random generators stay unchanged."""
        now = rng.snapshot()
        generators = epoch_state.generators(self.loader)
        try:
            if isinstance(self.loader, torch.utils.data.DataLoader):
                keeps_workers = self.loader.persistent_workers and self.loader.num_workers > 0
                if keeps_workers and self.loader._iterator is None:
                    iter(self.loader)  # the next `iter` then resets it, as in all epochs after the first
                epoch_state.restore(self.loader, generators, self._epoch_state)
                if keeps_workers and self._epoch_state["made_iterator"]:
                    # In that epoch, making the iterator drew the workers' base seed; a reset does not.
                    torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
                if hands_out_indices(self.loader):
                    return self._skipped(self._index, skip_batches)
                return skipping(self.loader, self._index)[0], skip_batches
            epoch_state.restore(self.loader, generators, self._epoch_state)
            iterator = iter(self.loader)
            for _ in range(self._index):
                next(iterator, None)
            return iterator, skip_batches
        finally:
            rng.restore(now)

    def _leave_out(self, iterator: Iterator[Any], num_batches: int) -> Iterator[Any]:
        """Skip batches, also across ends of epochs. They are consumed, or not read where that is possible."""
        while num_batches > 0:
            batch = next(iterator, _END)
            if batch is _END:
                if self._index == 0:
                    break  # an empty loader
                iterator, num_batches = self._start_later(num_batches)
                continue
            num_batches -= 1
            self._index += 1
            size = self._count("samples", count_samples, batch) or 0
            self.samples += size
            self.skipped_samples += size
        return iterator


_END = object()
