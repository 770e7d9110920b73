"""A cheap sum over the bits of all parameters: whether a restore really reached them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fp8watch.checkpoints.sharding import local_of

_WIDTH = 1021
"""Words in a row when places are weighted; a prime, so that rows of a matrix do not fall upon each other."""
_MASK = 0xFFFF_FFFF_FFFF_FFFF


def parameter_checksum(model: torch.nn.Module) -> str:
    """The sum over this rank's part of a model's parameters: hexadecimal, 64 bit."""
    return sum_bits(model.parameters())


def all_finite(model: torch.nn.Module) -> bool:
    """Whether every parameter is a number everywhere, in this rank's part. Reads them once; a device is waited for
    once. A kind of tensor whose extremes cannot be taken counts as one of numbers."""
    extremes = []
    for parameter in model.parameters():
        data = local_of(parameter).detach()
        if not data.numel() or not (data.is_floating_point() or data.is_complex()):
            continue
        data = torch.view_as_real(data) if data.is_complex() else data
        try:
            extremes += [value.float() for value in torch.aminmax(data.float() if data.element_size() == 1 else data)]
        except (RuntimeError, TypeError):
            continue
    if not extremes:
        return True
    first = extremes[0].device
    return bool(torch.isfinite(torch.stack([value.to(first) for value in extremes])).all())


def sum_bits(tensors: Iterable[torch.Tensor]) -> str:
    """Bits of each tensor summed as 64-bit integers, weighted by place, and the sums hashed: hexadecimal, 64 bit.

    Exact (modulo 2^64), so the order of summation does not matter. A change of one word is always noticed; an exchange
    of two is, unless they differ in nothing but their top bit or stand in one column and one row of the weighting.
    Reads the data twice and no more, which is what makes it fit into the time of a rollback; a device is waited for
    once.
    """
    sums = [value for value in _sums(tensors) if value is not None]
    if not sums:
        return "0" * 16
    return hashlib.blake2b(b"".join(value.to_bytes(8, "big") for value in sums), digest_size=8).hexdigest()


def sum_each(tensors: Iterable[torch.Tensor]) -> list[str]:
    """As `sum_bits`, of each tensor by itself, with its shape and dtype: what to call its contents by."""
    kept = [local_of(tensor) for tensor in tensors]
    pairs = zip(_sums(kept), kept, strict=True)
    return [
        hashlib.blake2b(f"{value} {tensor.dtype} {list(tensor.shape)}".encode(), digest_size=8).hexdigest()
        for value, tensor in pairs
    ]


def sum_nested(value: Any) -> str:
    """Of plain containers with tensors and plain values in them: equal for equal contents, hexadecimal, 64 bit."""
    tensors: list[torch.Tensor] = []
    form = _form(value, tensors)
    return hashlib.blake2b(f"{form} {sum_each(tensors)}".encode(), digest_size=8).hexdigest()


def _form(value: Any, tensors: list[torch.Tensor]) -> str:
    """All but the tensors, which are collected."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return "T"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_form(item, tensors)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_form(item, tensors) for item in value)}]"
    return repr(sorted(value, key=repr)) if isinstance(value, set) else repr(value)


def _sums(tensors: Iterable[torch.Tensor]) -> list[int | None]:
    """The weighted sum of each, None for an empty one. Devices are waited for once."""
    words = [_words(local_of(tensor)) for tensor in tensors]
    parts = [weigh(item) for item in words if item is not None]
    if not parts:
        return [None] * len(words)
    first = parts[0].device
    sums = iter(torch.stack([part.to(first) for part in parts]).tolist())
    return [None if item is None else next(sums) & _MASK for item in words]


def _words(data: torch.Tensor) -> torch.Tensor | None:
    """A tensor's bits as int64, zeros added at the end; None for an empty one."""
    if data.numel() == 0:
        return None
    flat = (torch.view_as_real(data) if data.is_complex() else data).contiguous().flatten()
    size = flat.element_size()
    if size * flat.numel() % 8 or flat.storage_offset() * size % 8:
        padded = torch.zeros(-(-size * flat.numel() // 8), dtype=torch.int64, device=flat.device)
        padded.view(flat.dtype)[: flat.numel()].copy_(flat)
        return padded
    return flat.view(torch.int64)


def weigh(words: torch.Tensor) -> torch.Tensor:
    """The weighted sum of int64 words, 0-D.

    Each word's weight is odd (odd for its column, even for its row): a change of one word is never lost.
    """
    rows = words.numel() // _WIDTH
    head, tail = words[: rows * _WIDTH].view(rows, _WIDTH), words[rows * _WIDTH :]
    columns = torch.arange(1, 2 * _WIDTH, 2, device=words.device, dtype=torch.int64)
    found = (tail * columns[: tail.numel()]).sum() * (4 * rows + 1)
    if rows:
        found = found + (head.sum(0) * columns).sum()
        found = found + (head.sum(1) * torch.arange(0, 4 * rows, 4, device=words.device, dtype=torch.int64)).sum()
    return found
