"""A sum over a file's bits that is as fast as reading it: what a rollback, which training waits for, checks files by.

SHA-256 goes at about 1 GB/s on a core, which would double the time of a rollback. This one goes at memory speed. Any
change within one 8-byte word is always noticed, other damage but for one case in 2^64; against somebody who means to
deceive it is no help. A resume, which nobody waits for, checks SHA-256.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from fp8watch.checkpoints.checksum import weigh

PIECE_BYTES = 4 << 20
_MAX_THREADS = 8
_buffers = threading.local()


def quick_sums(files: list[tuple[Path, int]], *, is_mapped: bool = False) -> list[str]:
    """Sums of (path, size) files: hexadecimal, 64 bit. Raises `OSError`, also for a file that ends early.

    `is_mapped`: map them and do not copy them, where nobody shortens them meanwhile.
    """
    pieces = [
        (path, start, min(PIECE_BYTES, size - start)) for path, size in files for start in range(0, size, PIECE_BYTES)
    ]
    add = _sum_mapped if is_mapped else _sum_piece
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)), len(pieces))
    if threads < 2:
        sums = iter([add(*piece) for piece in pieces])
    else:
        with ThreadPoolExecutor(threads) as pool:
            sums = iter(list(pool.map(lambda piece: add(*piece), pieces)))
    found = []
    for _, size in files:
        total = hashlib.blake2b(size.to_bytes(8, "big"), digest_size=8)
        for _ in range(0, size, PIECE_BYTES):
            total.update((next(sums) & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "big"))
        found.append(total.hexdigest())
    return found


def _sum_mapped(path: Path, start: int, length: int) -> int:
    words = length // 8
    if length % 8:
        return _sum_piece(path, start, length)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size < start + length:
            raise OSError(f"{path.name} ended early")
        # A private mapping: torch wants memory that it could write to.
        view = mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY, offset=start)
    finally:
        os.close(descriptor)
    return int(weigh(torch.frombuffer(view, dtype=torch.int64, count=words)))


def _sum_piece(path: Path, start: int, length: int) -> int:
    """Read and not mapped: a file that shrinks meanwhile is an error, and no signal that ends the process."""
    buffer: bytearray | None = getattr(_buffers, "buffer", None)
    if buffer is None:
        buffer = _buffers.buffer = bytearray(PIECE_BYTES)
    view, words = memoryview(buffer), -(-length // 8)
    view[8 * words - 8 : 8 * words] = bytes(8)  # what lies behind the end of the last word
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        done = 0
        while done < length:
            count = os.preadv(descriptor, [view[done:length]], start + done)
            if count == 0:
                raise OSError(f"{path.name} ended early")
            done += count
    finally:
        os.close(descriptor)
    return int(weigh(torch.frombuffer(buffer, dtype=torch.int64, count=words)))
