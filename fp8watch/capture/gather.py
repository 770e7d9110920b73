"""Writes a step's numbers to pinned host memory with one kernel, launched the short way.

A concatenation does the same through torch, at ten times the host time where nothing of it is in the caches: a view and
a dispatch for each tensor, an event to record and, at the next boundary, to query. Here the kernel itself says when it
is done, in host memory, and reading that costs nothing.

Only on x86, where the host sees memory in the order in which it was written, and only with a Triton that
`fp8watch.capture.triton_launch` knows. The first use in a process is a trial; if anything of it is not as expected,
torch concatenates.
"""

from __future__ import annotations

import logging
import platform
from typing import Any

import torch

from fp8watch.capture.triton_launch import Shortcut, is_known, shortcut

logger = logging.getLogger(__name__)

MOST_SEQUENCE = 2**31 - 1
_ORDERED = ("x86_64", "AMD64")
_Tensor = torch.Tensor
"""Looked up once."""


class Mark:
    """When a slot's last write is complete; has the methods of an event."""

    __slots__ = ("_device", "_flags", "_slot", "sequence", "stream")

    def __init__(self, flags: memoryview, slot: int, device: torch.device) -> None:
        """`flags`: int32, one for each slot, which the kernel writes."""
        self._flags, self._slot, self._device = flags, slot, device
        self.sequence = 0
        """Number of the slot's last write."""
        self.stream = 0
        """That it was launched on, as an address."""

    def query(self) -> bool:
        """Whether it is complete. Reads host memory only."""
        return self._flags[self._slot] == self.sequence

    def synchronize(self) -> None:
        """Wait for it. Raises `RuntimeError` if its stream is idle and it still is not complete."""
        if not self.query():
            # Address 0 is the default stream; torch takes it for "none given", and makes another stream.
            at, device = self.stream, self._device
            stream: torch.cuda.Stream = (
                torch.cuda.ExternalStream(at, device=device) if at else torch.cuda.default_stream(device)  # type: ignore[no-untyped-call]
            )
            stream.synchronize()
            if not self.query():
                raise RuntimeError("a step's numbers were not written: the kernel did not run")


class Gather:
    """The kernel for the slots of one device's ring."""

    def __init__(self, short: Shortcut, most_pieces: int, slots: list[torch.Tensor], device: torch.device) -> None:
        """`slots`: uint8, pinned, which kernels of the device can write to. Keeps them alive."""
        self._short, self._most = short, most_pieces
        self._slots = slots
        self._flags = torch.zeros(len(slots), dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        flags = memoryview(self._flags.numpy())  # type: ignore[arg-type]
        self._out = [slot.data_ptr() for slot in slots]
        self._flag_at = [self._flags.data_ptr() + 4 * i for i in range(len(slots))]
        self._marks = [Mark(flags, i, device) for i in range(len(slots))]
        self._sequence = 0

    def write(self, tensors: list[torch.Tensor], sizes: list[int], slot: int) -> Mark | None:
        """Start writing tensors, one after the other, into a slot. None: it cannot be done, and nothing was started.

        `tensors`: on the device; dense, without a pending negation. `sizes`: their bytes, even numbers. They may be
        overwritten once this returns, by kernels of the same stream.
        """
        short, missing = self._short, self._most - len(tensors)
        if missing < 0 or (short.current_device is not None and short.current_device() != short.device):
            return None
        addresses = []
        for tensor in tensors:
            address = tensor.data_ptr()
            if type(tensor) is not _Tensor or not tensor.is_contiguous() or (not address and tensor.numel()):
                return None
            addresses.append(address)
        self._sequence = sequence = self._sequence % MOST_SEQUENCE + 1
        mark, out = self._marks[slot], self._out[slot]
        mark.sequence, mark.stream = sequence, short.current_stream(short.device)
        short.launch(  # no scratch memory, no hooks
            short.programs, 1, 1, mark.stream, short.function,
            short.is_cooperative, short.is_dependent, None, None, short.metadata, None, None, None,
            out, self._flag_at[slot], sequence, *addresses, *[out] * missing,
            *[size >> 1 for size in sizes], *[0] * missing,
            None,  # the compile-time constant, which has to be there
        )  # fmt: skip
        return mark


_tried: dict[torch.device, tuple[Shortcut, int] | None] = {}
"""Devices of this process: how to launch the kernel, and its number of pieces."""


def try_out(device: torch.device) -> None:
    """Compile the kernel for a device and see what it writes. Waits for the device; at the first call only."""
    if device not in _tried:
        try:
            _tried[device] = _trial(device)
        except Exception as error:
            logger.info("fp8watch: a step's numbers are concatenated by torch: %s: %s", type(error).__name__, error)
            _tried[device] = None


def gather_for(slots: list[torch.Tensor], device: torch.device) -> Gather | None:
    """The kernel for these slots; None without a successful `try_out`. Does not wait."""
    known = _tried.get(device)
    return None if known is None else Gather(*known, slots, device)


def _trial(device: torch.device) -> tuple[Shortcut, int] | None:
    # Asked before anything is compiled: the kernel contains instructions of NVIDIA's, over which LLVM ends the process
    # when it compiles for another vendor.
    if platform.machine() not in _ORDERED or torch.version.hip is not None or not is_known():
        return None
    from fp8watch.capture.gather_kernel import BLOCK, MOST_PIECES, NUM_WARPS, gather

    with torch.cuda.device(device):
        generator = torch.Generator("cpu").manual_seed(0)
        pieces = [
            torch.randint(256, (size,), dtype=torch.uint8, device="cpu", generator=generator)
            for size in (2, 5000, 4, 2050, 8)
        ]
        wanted = torch.cat(pieces)
        there = [piece.to(device) for piece in pieces]
        host = [torch.zeros(8192, dtype=torch.uint8, device="cpu").pin_memory() for _ in range(2)]
        flag = torch.zeros(1, dtype=torch.int32, device="cpu").pin_memory()
        sizes = [piece.numel() for piece in pieces]
        out = host[0].data_ptr()
        compiled: Any = gather[(1,)](  # with no piece: only to compile it
            out, flag.data_ptr(), 1, *[out] * MOST_PIECES, *[0] * MOST_PIECES, BLOCK=BLOCK, num_warps=NUM_WARPS
        )  # fmt: skip
        torch.cuda.synchronize(device)
        short = shortcut(compiled, 1, device.index)
        if short is None:
            return None
        found = Gather(short, MOST_PIECES, host, device)
        for slot in (1, 0, 1):
            host[slot].zero_()
            mark = found.write(there, sizes, slot)
            if mark is None:
                return None
            mark.synchronize()
            if not torch.equal(host[slot][: len(wanted)], wanted) or host[slot][len(wanted) :].any():
                raise RuntimeError("the kernel wrote something else than what it was given")
    return short, MOST_PIECES
