"""Copies numbers from device to host: one asynchronous copy per step into a ring allocated once, read on a later step.

A step's tensors are packed into one buffer on their device, by one concatenation per dtype (and one copy per tensor
of a dtype that the host lacks, such as a BF16 loss). The buffer is copied to host memory (pinned, for an accelerator)
without waiting, and an event marks the end of the copy. `poll` queries the events and yields what has arrived, in
order; it never waits unless told to. A full ring drops the step and counts it, so training is never held up. On a CPU
the copy is complete at once. Called on the training thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from fp8watch.capture.arrived import Arrived, Segment

N = TypeVar("N")

ALIGNMENT = 16
"""Bytes. Every group of one dtype starts at a multiple of this, which is enough for any dtype."""
DEFAULT_SLOTS = 8
"""Steps in flight. A GPU is at most a few steps behind its host; 8 leaves room and costs little pinned memory."""
DEFAULT_SLOT_BYTES = 64 * 1024
KEPT_PLANS = 32
"""Most cached plans, one per kind of step (sampled or not, clipped or not, and so on)."""

_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype("<f4"),
    torch.float64: np.dtype("<f8"),
    torch.int32: np.dtype("<i4"),
    torch.int64: np.dtype("<i8"),
    torch.uint8: np.dtype("u1"),
    torch.bool: np.dtype("?"),
}

Given = torch.Tensor | list[torch.Tensor]
"""A tensor, or 1-D tensors of one device and dtype that arrive as one, in this order."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors of one dtype, side by side: one concatenation, whatever their number."""

    indices: list[int]
    dtype: torch.dtype
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Odd:
    """A tensor that is converted to another dtype by its copy."""

    index: int
    start: int
    count: int


_Shape = tuple[str, torch.dtype, int, bool, bool]
"""Name, dtype on arrival, number of elements, whether it is 0-D, whether it is converted from another dtype."""
_ODD = torch.float32


class _Plan:
    """Positions of a step's tensors in a slot. Made once for all steps with tensors of the same shapes."""

    def __init__(self, shapes: tuple[_Shape, ...]) -> None:
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, (_, dtype, _, _, is_odd) in enumerate(shapes):
            if not is_odd:
                by_dtype.setdefault(dtype, []).append(i)
        self.segments: dict[str, Segment] = {}
        self.groups: list[_Group] = []
        self.odd: list[_Odd] = []
        end = 0
        for dtype, indices in by_dtype.items():
            start = end
            for i in indices:
                end = self._place(shapes[i], end)
            self.groups.append(_Group(indices, dtype, start, end - start))
            end = _aligned(end)
        for i, shape in enumerate(shapes):
            if shape[4]:
                self.odd.append(_Odd(i, end, shape[2]))
                end = self._place(shape, end)
        self.nbytes = _aligned(end)

    def _place(self, shape: _Shape, start: int) -> int:
        """Place a tensor at `start` and return its end. Parts of one tensor must follow each other."""
        name, dtype, count, is_scalar, _ = shape
        before = self.segments.get(name)
        first, held = (start, 0) if before is None else (before.start, before.count)
        self.segments[name] = Segment(_DTYPES[dtype], first, held + count, is_scalar)
        return start + count * dtype.itemsize


_Views = tuple[list[torch.Tensor], list[torch.Tensor], tuple[torch.Tensor, torch.Tensor] | None]
"""Views for each group and each odd tensor; on an accelerator also source and target of the transfer."""


class _Lane:
    """The buffers of one device: a staging buffer on it, and a host buffer and an event per slot."""

    def __init__(self, device: torch.device, slots: int, slot_bytes: int) -> None:
        self.device = device
        self.slot_bytes = slot_bytes
        self.is_accelerator = device.type != "cpu"
        pin = self.is_accelerator
        self.host = [torch.zeros(slot_bytes, dtype=torch.uint8, device="cpu", pin_memory=pin) for _ in range(slots)]
        self.memory = [buffer.numpy() for buffer in self.host]
        self.staging = torch.zeros(slot_bytes, dtype=torch.uint8, device=device) if self.is_accelerator else None
        self.events = [torch.Event(device) for _ in range(slots)] if self.is_accelerator else []
        self._targets: dict[tuple[int, int], _Views] = {}
        self._plans: dict[tuple[_Shape, ...], _Plan] = {}

    def plan(self, shapes: tuple[_Shape, ...]) -> _Plan:
        """The plan for a step with these tensors, cached."""
        found = self._plans.get(shapes)
        if found is None:
            if len(self._plans) >= KEPT_PLANS:
                self._plans.clear()
                self._targets.clear()
            found = self._plans[shapes] = _Plan(shapes)
        return found

    def copy(self, plan: _Plan, tensors: list[torch.Tensor], slot: int) -> Any:
        """Start the copy: one concatenation per dtype and one transfer. Returns the event of its end, None on a CPU."""
        groups, odd, transfer = self._views(plan, slot)
        for group, target in zip(plan.groups, groups, strict=True):
            if group.nbytes:
                torch.cat([tensors[i] for i in group.indices], out=target)
        for one, target in zip(plan.odd, odd, strict=True):
            target.copy_(tensors[one.index])
        if transfer is None:
            return None
        device, host = transfer
        host.copy_(device, non_blocking=True)
        event = self.events[slot]
        event.record()
        return event

    def _views(self, plan: _Plan, slot: int) -> _Views:
        key = (id(plan), slot)
        views = self._targets.get(key)
        if views is None:
            memory = self.host[slot] if self.staging is None else self.staging
            views = self._targets[key] = (
                [memory[g.start : g.start + g.nbytes].view(g.dtype) for g in plan.groups],
                [memory[o.start : o.start + o.count * _ODD.itemsize].view(_ODD) for o in plan.odd],
                None if self.staging is None else (self.staging[: plan.nbytes], self.host[slot][: plan.nbytes]),
            )
        return views


@dataclass(slots=True)
class _InFlight(Generic[N]):
    slot: int
    note: N
    parts: list[tuple[_Lane, _Plan, Any]] = field(default_factory=list)


class Ring(Generic[N]):
    """A fixed number of steps in flight from device to host.

    `note` is whatever the caller wants returned with the numbers (step, host values).
    """

    def __init__(self, device: torch.device, slots: int = DEFAULT_SLOTS, slot_bytes: int = DEFAULT_SLOT_BYTES) -> None:
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._free = deque(range(slots))
        self._flight: deque[_InFlight[N]] = deque()
        self._lanes: dict[torch.device, _Lane] = {device: _Lane(device, slots, slot_bytes)}
        self._is_capturing = False
        """Whether a graph was being captured at the last `push`."""
        self.dropped = 0
        """Steps dropped because the ring was full or a graph was being captured."""

    def __len__(self) -> int:
        return len(self._flight)

    def push(self, tensors: Mapping[str, Given], note: N) -> bool:
        """Start the copy of 0-D and 1-D tensors (any device; bool, int or float). False: dropped and counted.

        The tensors may be overwritten once this returns: on their stream the copy comes first.
        """
        self._is_capturing = is_capturing()
        if not self._free or self._is_capturing:
            self.dropped += 1
            return False
        slot = self._free.popleft()
        entry: _InFlight[N] = _InFlight(slot, note)
        try:
            for device, (shapes, flat) in _by_device(tensors).items():
                lane, plan = self._lane(device, tuple(shapes))
                entry.parts.append((lane, plan, lane.copy(plan, flat, slot)))
        except BaseException:
            self._free.append(slot)
            raise
        self._flight.append(entry)
        return True

    def _lane(self, device: torch.device, shapes: tuple[_Shape, ...]) -> tuple[_Lane, _Plan]:
        lane = self._lanes.get(device)
        plan = _Plan(shapes) if lane is None else lane.plan(shapes)
        if lane is None or plan.nbytes > lane.slot_bytes:
            # A device or size not known at attach (a loss elsewhere, a new layout): allocate again. Steps in flight
            # keep the lane that they were copied into.
            lane = _Lane(device, self._slots, max(_aligned(plan.nbytes * 5 // 4), self._slot_bytes))
            self._lanes[device] = lane
            plan = lane.plan(shapes)
        return lane, plan

    def poll(self, *, wait: bool = False) -> Iterator[tuple[N, Arrived]]:
        """Yield what has arrived, oldest first. `wait`: block until all has (rollback, detach; never in a step).

        Yields nothing during a graph capture; without `wait` that is checked only if the last `push` found a capture.
        """
        if not self._flight or ((wait or self._is_capturing) and is_capturing()):
            return
        while self._flight:
            entry = self._flight[0]
            for _, _, event in entry.parts:
                if event is not None:
                    if wait:
                        event.synchronize()
                    elif not event.query():
                        return
            self._flight.popleft()
            values = _NOTHING
            for lane, plan, _ in entry.parts:
                part = Arrived(lane.memory[entry.slot][: plan.nbytes].tobytes(), plan.segments)
                values = part if values is _NOTHING else values.beside(part)
            self._free.append(entry.slot)
            yield entry.note, values


def _by_device(tensors: Mapping[str, Given]) -> dict[torch.device, tuple[list[_Shape], list[torch.Tensor]]]:
    """Shapes and tensors by device, flat and detached."""
    found: dict[torch.device, tuple[list[_Shape], list[torch.Tensor]]] = {}
    here: torch.device | None = None
    shapes: list[_Shape] = []
    flat: list[torch.Tensor] = []
    for name, given in tensors.items():
        for tensor in given if isinstance(given, list) else (given,):
            if tensor.requires_grad:
                tensor = tensor.detach()
            if (device := tensor.device) != here:
                here, (shapes, flat) = device, found.setdefault(device, ([], []))
            dtype, is_scalar = tensor.dtype, tensor.dim() == 0
            if dtype not in _DTYPES:
                shapes.append((name, _ODD, tensor.numel(), is_scalar, True))
            else:
                if is_scalar:
                    tensor = tensor.unsqueeze(0)
                    shapes.append((name, dtype, 1, True, False))
                else:
                    shapes.append((name, dtype, tensor.numel(), False, False))
            flat.append(tensor)
    return found


_NOTHING = Arrived(b"", {})


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on this stream; then events must be neither recorded nor queried."""
    global _ask
    if _ask is None:
        # Not `torch.cuda.is_available`, which asks the driver at every call.
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return False
        # What `torch.cuda.is_current_stream_capturing` calls, without its overhead: this is called in every cast.
        _ask = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)
    return _ask()


_ask: Callable[[], bool] | None = None
