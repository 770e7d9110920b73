"""Where per-tensor numbers come from: one source per framework.

A source is read once per optimizer step, at the boundary, on the training thread. It returns device tensors and never
synchronises; `fp8watch.capture.ring` copies them to the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from fp8watch.capture.to_device import to_device
from fp8watch.records import TensorColumn


class Pieces(Mapping[str, torch.Tensor]):
    """Columns that consist of several tensors on one device, as a framework's vectors do.

    The ring takes the parts directly (`parts`), which costs no kernel. A column is put together, once, when somebody
    accesses it by name.
    """

    __slots__ = ("_whole", "parts", "places")

    def __init__(self, parts: dict[str, list[torch.Tensor]], places: Places | None = None) -> None:
        """`parts`: name -> at least one 1-D tensor, in order, all of one dtype. `places`: of the columns in
        the joined parts, if these have more elements than there are columns."""
        self.parts = parts
        self.places = places
        self._whole: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        whole = self._whole.get(name)
        if whole is None:
            whole = torch.cat(self.parts[name])
            if self.places is not None:
                whole = whole[self.places.on(whole.device)]
            self._whole[name] = whole
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


class Places:
    """Which elements of the joined parts are columns: int64 indices, in the order of the columns.

    The frame's maker picks them on the host, from bytes that have arrived, because there it costs no kernel.
    """

    def __init__(self, indices: Sequence[int]) -> None:
        self.host = np.array(indices, dtype=np.int64)
        self._device: torch.Tensor | None = None

    def on(self, device: torch.device) -> torch.Tensor:
        """The indices on a device. Kept, because a copy that does not wait needs pinned memory."""
        if self._device is None or self._device.device != device:
            self._device = to_device(torch.from_numpy(self.host), device)
        return self._device


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a source: 1-D tensors in the order of `Source.columns()`, on any device.

    `values` has the keys and dtypes of `fp8watch.records.StepFrame.columns`; `valid` (bool, same length) may be left
    out if everything was observed. The next call of the source may overwrite the tensors.
    """

    values: Mapping[str, torch.Tensor]
    """A dict, or `Pieces`."""
    valid: dict[str, torch.Tensor] = {}
    zero_is_unseen: bool = False
    """An amax of 0 means that nothing of that tensor was observed, in any column without an entry in `valid`. This is
    evaluated on the host, where it costs no kernel."""
    updates_forward: int = 1
    updates_backward: int = 1

    @property
    def places(self) -> npt.NDArray[np.int64] | None:
        """Of the columns in the joined parts of `values`; None: they are all, or `values` has no parts."""
        places = self.values.places if isinstance(self.values, Pieces) else None
        return None if places is None else places.host

    def validity(self, name: str) -> torch.Tensor:
        """Which elements of the column were observed (bool, same length). Launches a kernel if `valid` has no entry."""
        if name in self.valid:
            return self.valid[name]
        if self.zero_is_unseen:
            return self.values["amax"] != 0
        return torch.ones(self.values[name].shape, dtype=torch.bool, device=self.values[name].device)


class Source(Protocol):
    """Reads one framework's FP8 state."""

    name: str

    def columns(self) -> Sequence[TensorColumn]:
        """The tensors in order, with their current recipe. A changed result makes a new layout."""

    def not_observable(self) -> Sequence[str]:
        """`module: reason` for every FP8 module whose numbers cannot be read."""

    def begin(self, *, with_statistics: bool) -> None:
        """Start an optimizer step: clear the previous one; count elements if asked."""

    def read(self) -> Reading | None:
        """This step's numbers; None when no FP8 module ran.

        Without a `begin` since the last reading it would be the largest amax of several steps: then None too
        (`OneStep`).
        """

    def detach(self) -> None:
        """Remove all hooks and patches."""


class OneStep:
    """Whether what a source has observed is of one step: that ends with a reading, and the next one has to begin.

    A source that could not begin is still read: it hands out nothing then, because its numbers are those of two steps.
    """

    def __init__(self) -> None:
        self.is_begun = True

    def begin(self) -> None:
        """The source has forgotten the step before."""
        self.is_begun = True

    def end(self) -> None:
        """The source has made a reading."""
        self.is_begun = False
