"""A cheap checksum over the bits of all parameters, which verifies a restore.

A manifest names the algorithm of its checksums (`Manifest.checksum_algorithm`), so that a checkpoint of an earlier
version is verified by the algorithm with which it was saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fp8watch.checkpoints.bit_sums import ALGORITHMS, LATEST
from fp8watch.checkpoints.sharding import local_of


def parameter_checksum(model: torch.nn.Module, algorithm: str = LATEST) -> str:
    """Checksum of this rank's part of a model's parameters: hexadecimal, 64 bits. `algorithm`: one of `ALGORITHMS`."""
    return sum_bits(model.parameters(), algorithm)


def all_finite(model: torch.nn.Module) -> bool:
    """Whether all parameters are finite, in this rank's part. Reads them once and synchronises once. A type of tensor
    without `aminmax` counts as finite."""
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


def sum_bits(tensors: Iterable[torch.Tensor], algorithm: str = LATEST) -> str:
    """Checksum over the bits of all tensors, without their shapes and dtypes: hexadecimal, 64 bits.

    See `fp8watch.checkpoints.bit_sums` for what it detects. Reads the data twice, so that it fits into the time of a
    rollback. Synchronises once for each device.
    """
    sums = [value for value in _sums(tensors, algorithm) if value is not None]
    if not sums:
        return "0" * 16
    return hashlib.blake2b(b"".join(value.to_bytes(8, "big") for value in sums), digest_size=8).hexdigest()


def sum_each(tensors: Iterable[torch.Tensor]) -> list[str]:
    """Like `sum_bits`, but for each tensor, including its shape and dtype: a name for its contents."""
    kept = [local_of(tensor) for tensor in tensors]
    pairs = zip(_sums(kept), kept, strict=True)
    return [
        hashlib.blake2b(f"{value} {tensor.dtype} {list(tensor.shape)}".encode(), digest_size=8).hexdigest()
        for value, tensor in pairs
    ]


def sum_nested(value: Any) -> str:
    """Checksum of nested containers with tensors and plain values: equal for equal contents, hexadecimal, 64 bits."""
    tensors: list[torch.Tensor] = []
    form = _form(value, tensors)
    return hashlib.blake2b(f"{form} {sum_each(tensors)}".encode(), digest_size=8).hexdigest()


def _form(value: Any, tensors: list[torch.Tensor]) -> str:
    """A description without the tensors, which are collected in `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return "T"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_form(item, tensors)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_form(item, tensors) for item in value)}]"
    return repr(sorted(value, key=repr)) if isinstance(value, set) else repr(value)


def _sums(tensors: Iterable[torch.Tensor], algorithm: str = LATEST) -> list[int | None]:
    """The 64-bit sum of each tensor, None for an empty one."""
    words = [_words(local_of(tensor)) for tensor in tensors]
    sums = iter(ALGORITHMS[algorithm]([item for item in words if item is not None]))
    return [None if item is None else next(sums) for item in words]


def _words(data: torch.Tensor) -> torch.Tensor | None:
    """A tensor's bits as int64, padded with zeros; None for an empty one."""
    if data.numel() == 0:
        return None
    flat = (torch.view_as_real(data) if data.is_complex() else data).contiguous().flatten()
    size = flat.element_size()
    if size * flat.numel() % 8 or flat.storage_offset() * size % 8:
        padded = torch.zeros(-(-size * flat.numel() // 8), dtype=torch.int64, device=flat.device)
        padded.view(flat.dtype)[: flat.numel()].copy_(flat)
        return padded
    return flat.view(torch.int64)
