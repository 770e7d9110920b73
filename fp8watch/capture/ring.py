"""Numbers leave the device here: one asynchronous copy a step into a ring allocated once, looked at on a later step.

A step's tensors are packed into one buffer on their device, copied to host memory (pinned, for an accelerator)
without waiting, and an event marks the end of the copy. `poll` asks the events and hands out what has arrived, in
order; it never waits unless told to. A full ring drops the step and counts it: training is never held up. On a
CPU the copy is complete at once. Called on the training thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

N = TypeVar("N")

ALIGNMENT = 16
"""Every segment starts at a multiple of it: enough for any dtype, and one cache sector of a GPU."""
DEFAULT_SLOTS = 8
"""Steps in flight. A GPU runs a few steps behind its host at most; 8 leaves room and costs little pinned memory."""
DEFAULT_SLOT_BYTES = 64 * 1024

_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype("<f4"),
    torch.float64: np.dtype("<f8"),
    torch.int32: np.dtype("<i4"),
    torch.int64: np.dtype("<i8"),
    torch.uint8: np.dtype("u1"),
    torch.bool: np.dtype("?"),
}

Values = dict[str, npt.NDArray[Any]]


@dataclass(slots=True)
class _Segment:
    name: str
    dtype: np.dtype[Any]
    start: int
    nbytes: int
    is_scalar: bool


class _Lane:
    """The buffers of one device: staging on it, one host buffer a slot."""

    def __init__(self, device: torch.device, slots: int, slot_bytes: int) -> None:
        self.device = device
        self.slot_bytes = slot_bytes
        self.is_accelerator = device.type != "cpu"
        pin = self.is_accelerator
        self.host = [torch.zeros(slot_bytes, dtype=torch.uint8, pin_memory=pin) for _ in range(slots)]
        self.staging = torch.zeros(slot_bytes, dtype=torch.uint8, device=device) if self.is_accelerator else None

    def copy(self, tensors: list[tuple[str, torch.Tensor]], slot: int) -> tuple[list[_Segment], Any]:
        target = self.host[slot] if self.staging is None else self.staging
        segments: list[_Segment] = []
        views: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        end = 0
        for name, tensor in tensors:
            if tensor.dtype not in _DTYPES:
                tensor = tensor.to(torch.float32)
            count = tensor.numel()
            nbytes = count * tensor.element_size()
            if count:
                views.append(target[end : end + nbytes].view(tensor.dtype))
                sources.append(tensor.reshape(-1))
            segments.append(_Segment(name, _DTYPES[tensor.dtype], end, nbytes, tensor.dim() == 0))
            end = _aligned(end + nbytes)
        if views:
            torch._foreach_copy_(views, sources, non_blocking=True)  # one call; a step has about thirty of them
        if self.staging is None:
            return segments, None
        self.host[slot][:end].copy_(self.staging[:end], non_blocking=True)
        event = torch.Event(self.device)
        event.record()
        return segments, event


@dataclass(slots=True)
class _InFlight(Generic[N]):
    slot: int
    note: N
    parts: list[tuple[_Lane, list[_Segment], Any]] = field(default_factory=list)


class Ring(Generic[N]):
    """A fixed number of steps in flight from device to host.

    `note` is whatever the caller wants back with the numbers (step, host values).
    """

    def __init__(self, device: torch.device, slots: int = DEFAULT_SLOTS, slot_bytes: int = DEFAULT_SLOT_BYTES) -> None:
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._free = deque(range(slots))
        self._flight: deque[_InFlight[N]] = deque()
        self._lanes: dict[torch.device, _Lane] = {device: _Lane(device, slots, slot_bytes)}
        self.dropped = 0
        """Steps that found the ring full, or fell into a graph capture."""

    def __len__(self) -> int:
        return len(self._flight)

    def push(self, tensors: Mapping[str, torch.Tensor], note: N) -> bool:
        """Start the copy of 0-D and 1-D tensors (any device, bool, int or float); False: dropped and counted.

        The tensors may be overwritten as soon as this returns: the copy is ordered before that on their stream.
        """
        if not self._free or is_capturing():
            self.dropped += 1
            return False
        slot = self._free.popleft()
        entry: _InFlight[N] = _InFlight(slot, note)
        try:
            by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
            for name, tensor in tensors.items():
                by_device.setdefault(tensor.device, []).append((name, tensor.detach()))
            for device, group in by_device.items():
                lane = self._lane(device, group)
                entry.parts.append((lane, *lane.copy(group, slot)))
        except BaseException:
            self._free.append(slot)
            raise
        self._flight.append(entry)
        return True

    def _lane(self, device: torch.device, group: list[tuple[str, torch.Tensor]]) -> _Lane:
        needed = sum(_aligned(max(t.element_size(), 4) * t.numel()) for _, t in group)
        lane = self._lanes.get(device)
        if lane is None or needed > lane.slot_bytes:
            # A device or size not foreseen at attach (a loss elsewhere, a new layout): allocate once more. Steps
            # in flight keep the lane they were copied into.
            lane = _Lane(device, self._slots, max(_aligned(needed * 5 // 4), self._slot_bytes))
            self._lanes[device] = lane
        return lane

    def poll(self, *, wait: bool = False) -> Iterator[tuple[N, Values]]:
        """What has arrived, oldest first. `wait`: block until all of it has (rollback, detach; never in a step)."""
        while self._flight and not is_capturing():
            entry = self._flight[0]
            for _, _, event in entry.parts:
                if event is not None:
                    if wait:
                        event.synchronize()
                    elif not event.query():
                        return
            self._flight.popleft()
            values: Values = {}
            for lane, segments, _ in entry.parts:
                memory = lane.host[entry.slot].numpy()
                for segment in segments:
                    raw = memory[segment.start : segment.start + segment.nbytes]
                    array = raw.view(segment.dtype).copy()
                    values[segment.name] = array.reshape(()) if segment.is_scalar else array
            self._free.append(entry.slot)
            yield entry.note, values


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def is_capturing() -> bool:
    """A CUDA graph is being captured on this stream: events must be neither recorded nor asked."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
