"""Copies numbers from device to host: one asynchronous write per step into a ring allocated once, read on a later step.

A step's tensors are joined as bytes; the host knows what each is. The output is host memory: kernels write pinned
memory directly where the device can (`fp8watch.capture.mapped`), elsewhere a buffer on the device is copied. A kernel
of our own does it where possible (`fp8watch.capture.gather`), else one concatenation of torch with an event after it.
`poll` asks whether the writes are complete and returns what has arrived, in order; it never waits unless told to. A
full ring drops the step and counts it, so training is never held up. On a CPU the copy is complete at once. Called on
the training thread only.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from fp8watch.capture.arrived import Arrived, Segment
from fp8watch.capture.gather import Gather, gather_for, try_out
from fp8watch.capture.mapped import can_map, mapped

logger = logging.getLogger(__name__)

N = TypeVar("N")

ALIGNMENT = 16
"""Bytes; sizes of slots are multiples of it."""
DEFAULT_SLOTS = 8
"""Steps in flight. A GPU is at most a few steps behind its host; 8 leaves room and costs little pinned memory."""
DEFAULT_SLOT_BYTES = 64 * 1024
KEPT_PLANS = 32
"""Most cached plans, one per kind of step (sampled or not, clipped or not, and so on)."""

_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype("<f4"),
    torch.float64: np.dtype("<f8"),
    torch.float16: np.dtype("<f2"),
    torch.bfloat16: np.dtype("<f4"),
    torch.int32: np.dtype("<i4"),
    torch.int64: np.dtype("<i8"),
    torch.uint8: np.dtype("u1"),
    torch.bool: np.dtype("?"),
}
"""What the host reads them as. BF16 is widened there (`Segment.is_bf16`); other dtypes become float32 on the device."""
_SIZES = {dtype: dtype.itemsize for dtype in _DTYPES}

Given = torch.Tensor | list[torch.Tensor]
"""A tensor, or 1-D tensors of one device and dtype that arrive as one, in this order."""

_Shape = tuple[str, torch.dtype, int, bool]
"""Name, dtype, number of elements, whether it is 0-D."""


class _Plan:
    """Positions of a step's tensors in a slot. Made once for all steps with tensors of the same shapes."""

    def __init__(self, shapes: tuple[_Shape, ...]) -> None:
        dtypes = {dtype for _, dtype, _, _ in shapes}
        self.dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        """In which the tensors are joined: their own if they have only one, else bytes."""
        self.segments: dict[str, Segment] = {}
        end = 0
        for name, dtype, count, is_scalar in shapes:
            self.segments[name] = Segment(_DTYPES[dtype], end, count, is_scalar, is_bf16=dtype == torch.bfloat16)
            end += count * dtype.itemsize
        self.nbytes = end
        self.is_even = all(dtype.itemsize % 2 == 0 for _, dtype, _, _ in shapes)


_Target = tuple[torch.Tensor, torch.Tensor | None]
"""Where a plan's tensors are joined for a slot; and where that is copied to, if it is not host memory itself."""


class _Lane:
    """The buffers of one device: a host buffer and an event per slot, a staging buffer if kernels cannot write to it.

    `may_map`: whether they can, if that is known already; finding out waits for the device.
    """

    def __init__(self, device: torch.device, slots: int, slot_bytes: int, *, may_map: bool) -> None:
        self.device = device
        self.slot_bytes = slot_bytes
        self.may_map = may_map
        is_accelerator = device.type != "cpu"
        self.host = [
            torch.zeros(slot_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_accelerator) for _ in range(slots)
        ]
        self.memory = [buffer.numpy() for buffer in self.host]
        self._written = self.host
        self._gather: Gather | None = None
        self._staging: torch.Tensor | None = None
        if is_accelerator:
            try:
                self._written = [mapped(buffer, device) for buffer in self.host] if may_map else []
            except RuntimeError:  # memory that was pinned for another device
                self._written = []
            self._gather = gather_for(self.host, device) if self._written else None
            if not self._written:
                self._staging = torch.zeros(slot_bytes, dtype=torch.uint8, device=device)
        self.events = [torch.Event(device) for _ in range(slots)] if is_accelerator else []
        self._targets: dict[tuple[int, int], _Target] = {}
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

    def copy(self, plan: _Plan, tensors: list[torch.Tensor], sizes: list[int], slot: int) -> Any:
        """Start the copy. Returns an event or mark of its end, None on a CPU."""
        if self._gather is not None and plan.is_even:
            try:
                mark = self._gather.write(tensors, sizes, slot)
            except Exception:
                logger.warning("fp8watch: the kernel that writes a step failed; torch does it instead", exc_info=True)
                self._gather = mark = None
            if mark is not None:
                return mark
        tensors = [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]
        tensors = [tensor.view(1) if tensor.dim() == 0 else tensor for tensor in tensors]
        found = self._targets.get((id(plan), slot))
        target, host = self._target(plan, slot) if found is None else found
        if plan.dtype is torch.uint8:
            tensors = _bytes(tensors)
        torch.cat(tensors, out=target)
        if not self.events:
            return None
        if host is not None:
            host.copy_(target, non_blocking=True)
        event = self.events[slot]
        event.record()
        return event

    def _target(self, plan: _Plan, slot: int) -> _Target:
        def view(memory: torch.Tensor) -> torch.Tensor:
            return memory[: plan.nbytes].view(plan.dtype)

        if self._staging is None:
            found: _Target = (view(self._written[slot]), None)
        else:
            found = (view(self._staging), view(self.host[slot]))
        self._targets[id(plan), slot] = found
        return found


@dataclass(slots=True)
class _InFlight(Generic[N]):
    slot: int
    note: N
    parts: list[tuple[_Lane, _Plan, Any]]


class Ring(Generic[N]):
    """A fixed number of steps in flight from device to host.

    `note` is whatever the caller wants returned with the numbers (step, host values).
    """

    def __init__(self, device: torch.device, slots: int = DEFAULT_SLOTS, slot_bytes: int = DEFAULT_SLOT_BYTES) -> None:
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._free = deque(range(slots))
        self._flight: deque[_InFlight[N]] = deque()
        may_map = device.type == "cuda" and can_map(device)
        if may_map:
            try_out(device)
        self._lanes: dict[torch.device, _Lane] = {device: _Lane(device, slots, slot_bytes, may_map=may_map)}
        self._failed: list[tuple[_Lane, _Plan, Any]] = []
        """Of pushes that failed for another device: kept until nothing writes to their memory any more."""
        self._is_capturing = False
        """Whether a graph was being captured at the last `push`."""
        self.dropped = 0
        """Steps dropped because the ring was full, a graph was being captured, or the device failed to write them."""

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
        parts = []
        try:
            for device, (shapes, flat, sizes) in _by_device(tensors).items():
                lane, plan = self._lane(device, tuple(shapes))
                parts.append((lane, plan, lane.copy(plan, flat, sizes, slot)))
        except BaseException:
            self._free.append(slot)
            self._failed += parts
            raise
        if self._failed:
            self._failed = [part for part in self._failed if part[2] is not None and not part[2].query()]
        self._flight.append(_InFlight(slot, note, parts))
        return True

    def _lane(self, device: torch.device, shapes: tuple[_Shape, ...]) -> tuple[_Lane, _Plan]:
        lane = self._lanes.get(device)
        plan = _Plan(shapes) if lane is None else lane.plan(shapes)
        if lane is None or plan.nbytes > lane.slot_bytes:
            # A device or size not known at attach (a loss elsewhere, a new layout): allocate again. Steps in flight
            # keep the lane that they were copied into.
            may_map = lane is not None and lane.may_map
            lane = _Lane(device, self._slots, max(_aligned(plan.nbytes * 5 // 4), self._slot_bytes), may_map=may_map)
            self._lanes[device] = lane
            plan = lane.plan(shapes)
        return lane, plan

    def poll(self, *, wait: bool = False) -> list[tuple[N, Arrived]]:
        """What has arrived, oldest first. `wait`: block until all has (rollback, detach; never in a step).

        Nothing during a graph capture; without `wait` that is checked only if the last `push` found a capture.
        """
        found: list[tuple[N, Arrived]] = []
        if not self._flight or ((wait or self._is_capturing) and is_capturing()):
            return found
        while self._flight:
            entry, is_written = self._flight[0], True
            for _, _, event in entry.parts:
                if event is not None:
                    if wait:
                        is_written = _wait(event) and is_written
                    elif not event.query():
                        return found
            self._flight.popleft()
            if not is_written:
                self._free.append(entry.slot)
                self.dropped += 1
                continue
            values = _NOTHING
            for lane, plan, _ in entry.parts:
                part = Arrived(lane.memory[entry.slot][: plan.nbytes].tobytes(), plan.segments)
                values = part if values is _NOTHING else values.beside(part)
            self._free.append(entry.slot)
            found.append((entry.note, values))
        return found


def _wait(event: Any) -> bool:
    """False: what it marks the end of does not come."""
    try:
        event.synchronize()
    except RuntimeError as error:
        logger.warning("fp8watch: the numbers of a step are lost: %s", error)
        return False
    return True


def _bytes(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    try:
        return [tensor.view(torch.uint8) for tensor in tensors]
    except RuntimeError:  # elements that are not side by side
        copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
        return [tensor.view(torch.uint8) for tensor in copies]


_Sorted = tuple[list[_Shape], list[torch.Tensor], list[int]]
"""Shapes by name; tensors, and the bytes of each."""


def _by_device(tensors: Mapping[str, Given]) -> dict[torch.device, _Sorted]:
    found: dict[torch.device, _Sorted] = {}
    here: torch.device | None = None
    shapes: list[_Shape] = []
    flat: list[torch.Tensor] = []
    sizes: list[int] = []
    for name, given in tensors.items():
        first = given[0] if isinstance(given, list) else given
        if (device := first.device) != here:
            here, (shapes, flat, sizes) = device, found.setdefault(device, ([], [], []))
        dtype = first.dtype
        size = _SIZES.get(dtype)
        if size is None:
            dtype, size = torch.float32, 4
            given = [part.to(dtype) for part in given] if isinstance(given, list) else given.to(dtype)
        if isinstance(given, list):
            # Of one dtype, or what follows would be read from the wrong place.
            parts = [part if part.dtype is dtype else part.to(dtype) for part in given]
            counts = [part.numel() for part in parts]
            flat += parts
            sizes += [count * size for count in counts]
            shapes.append((name, dtype, sum(counts), False))
        else:
            is_scalar = given.dim() == 0
            count = 1 if is_scalar else given.numel()
            flat.append(given)
            sizes.append(count * size)
            shapes.append((name, dtype, count, is_scalar))
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
