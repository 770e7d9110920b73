"""Scales and amax windows after a restore: are they really those that were saved?

A scale that is back at 1 makes the loss explode a few steps after a restore that looked fine. Modules that one of the
two sides does not know (in Transformer Engine a module has no state before its first forward) are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fp8watch.checkpoints.checksum import sum_bits


def form_differs(saved: Mapping[str, Any], live: Mapping[str, Any]) -> str | None:
    """Which saved entry has another shape than the live one; None: none has."""
    for name, first, second in _common(saved, live):
        if first.shape != second.shape:
            return f"FP8 state of {name}: {tuple(first.shape)} was saved, here it is {tuple(second.shape)}"
    return None


def not_restored(saved: Mapping[str, Any], live: Mapping[str, Any]) -> str | None:
    """Which live entry is not what was saved, to the bit; None: all are."""
    for name, first, second in _common(saved, live):
        if sum_bits([first]) != sum_bits([second.to(first.device)]):
            return f"FP8 state of {name} was not restored"
    return None


def _common(
    saved: Mapping[str, Any], live: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    for key, value in saved.items():
        other, name = live.get(key), f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            yield from _common(value, other, name)
        elif isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
            yield name, value, other
