"""Counts the samples and tokens of a batch of tensors, mappings, tuples and lists.

Only shapes and dtypes are read, never values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

MAX_DEPTH = 4
"""Nesting levels that are searched. Batches usually nest a dict in a tuple; anything deeper is left alone."""

_TOKEN_KEYS = ("input_ids", "tokens")


def count_samples(batch: Any) -> int | None:
    """Length of the first dimension of the first tensor; 1 for a 0-D tensor; None without a tensor."""
    for tensor in _tensors(batch):
        return int(tensor.size(0)) if tensor.dim() else 1  # a nested tensor has no shape, but a first dimension
    return None


def count_tokens(batch: Any) -> int | None:
    """Number of elements of `input_ids` or `tokens`, else of the first integer tensor with at least 2 dimensions; None
    without one."""
    if isinstance(batch, Mapping):
        for key in _TOKEN_KEYS:
            found = _field(batch, key)
            if isinstance(found, torch.Tensor):
                return int(found.numel())
    for tensor in _tensors(batch):
        if tensor.dim() >= 2 and tensor.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
            return int(tensor.numel())
    return None


def _field(batch: Mapping[Any, Any], key: str) -> Any:
    """A field; None if it is missing or raises anything, as the fields of lazy mappings may."""
    try:
        return batch.get(key)
    except Exception:
        return None


def _tensors(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < MAX_DEPTH:
        if isinstance(value, Mapping):
            for item in value.values():
                yield from _tensors(item, depth + 1)
        elif isinstance(value, list | tuple):
            for item in value:
                yield from _tensors(item, depth + 1)
