"""Sums over the 64-bit words of tensors, from which checksums are made. Exact, so CPU and GPU give the same sums.

`row-column-sums` adds the words of each row and of each column of a 2-D arrangement. These sums, and the words that
fill no row, are then hashed with their places. It detects, but for one case in 2^64, every change of up to three words
and every exchange of two: a change escapes only if it cancels out in each row and each column that it touches, which
takes four words at the corners of a rectangle. It protects against faults, not against tampering.

`weighted-sum` is that of manifests before format version 4. It misses an exchange of two words of equal weight, such as
column c of a row and column c - 2 of the next, and two flips of the highest bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

_WIDTH = 1021
"""Words per row. A prime, so that it does not coincide with the rows of a matrix."""
_MASK = 0xFFFF_FFFF_FFFF_FFFF


def row_column_sums(words: Sequence[torch.Tensor]) -> list[int]:
    """The sum of each 1-D int64 tensor. Reads the data twice, with temporary tensors of about 1/1021 of its size.
    Synchronises once for each device."""
    found = [0] * len(words)
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for index, item in enumerate(words):
        by_device[item.device].append(index)
    for device, indices in by_device.items():
        parts = [_rows_and_columns(words[index]) for index in indices]
        sizes = [sum(part.numel() for part in pieces) for pieces in parts]
        places = torch.arange(max(sizes), device=device)
        mixed = _mix(torch.cat([part for pieces in parts for part in pieces]), torch.cat([places[:n] for n in sizes]))
        ends = mixed.cumsum(0)[torch.tensor(list(accumulate(sizes)), device=device) - 1].tolist()
        for index, end, before in zip(indices, ends, [0, *ends[:-1]], strict=True):
            found[index] = (end - before) & _MASK
    return found


def _rows_and_columns(words: torch.Tensor) -> list[torch.Tensor]:
    """The sums of the rows, the sums of the columns, and the words that fill no row."""
    rows = words.numel() // _WIDTH
    if not rows:
        return [words]
    head = words[: rows * _WIDTH].view(rows, _WIDTH)
    return [head.sum(1), head.sum(0), words[rows * _WIDTH :]]


def _mix(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Hash int64 values together with their places, by the finaliser of SplitMix64 (Steele et al., OOPSLA 2014). One to
    one in the value. Changes `values`."""
    values = values.add_(places * _signed(0x9E37_79B9_7F4A_7C15))
    for shift, factor in ((30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB), (31, 1)):
        # torch shifts int64 arithmetically, so the copies of the sign are masked out.
        values = values.bitwise_xor_((values >> shift) & ((1 << (64 - shift)) - 1)).mul_(_signed(factor))
    return values


def _signed(value: int) -> int:
    """The int64 with the same bits as an unsigned number."""
    return value - (1 << 64) if value >> 63 else value


def weighted_sums(words: Sequence[torch.Tensor]) -> list[int]:
    """The sum of each 1-D int64 tensor, weighted by position. Synchronises once."""
    parts = [_weigh(item) for item in words]
    return (
        [value & _MASK for value in torch.stack([part.to(parts[0].device) for part in parts]).tolist()] if parts else []
    )


def _weigh(words: torch.Tensor) -> torch.Tensor:
    """The weighted sum of int64 words, 0-D. Each weight is odd: an odd number for the column plus an even one for the
    row."""
    rows = words.numel() // _WIDTH
    head, tail = words[: rows * _WIDTH].view(rows, _WIDTH), words[rows * _WIDTH :]
    columns = torch.arange(1, 2 * _WIDTH, 2, device=words.device, dtype=torch.int64)
    found = (tail * columns[: tail.numel()]).sum() * (4 * rows + 1)
    if rows:
        found = found + (head.sum(0) * columns).sum()
        found = found + (head.sum(1) * torch.arange(0, 4 * rows, 4, device=words.device, dtype=torch.int64)).sum()
    return found


WEIGHTED = "weighted-sum"
LATEST = "row-column-sums"
ALGORITHMS: dict[str, Callable[[Sequence[torch.Tensor]], list[int]]] = {
    LATEST: row_column_sums,
    WEIGHTED: weighted_sums,
}
