"""Verifies scales and amax histories after a restore.

A scale that is reset to 1 makes the loss explode a few steps after a restore that looked fine. Modules that only one
side knows are ignored (in Transformer Engine a module has no state before its first forward).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fp8watch.checkpoints.checksum import sum_each


def form_differs(saved: Mapping[str, Any], live: Mapping[str, Any]) -> str | None:
    """The first saved entry whose shape differs from the live one, in words; None: there is none."""
    for name, first, second in _common(saved, live):
        if first.shape != second.shape:
            return f"FP8 state of {name}: {tuple(first.shape)} was saved, here it is {tuple(second.shape)}"
    return None


def not_restored(saved: Mapping[str, Any], live: Mapping[str, Any]) -> str | None:
    """The first live entry that is not bit-identical to the saved one, in words; None: there is none."""
    entries = list(_common(saved, live))
    # All in one go: each call waits for the device.
    pairs = zip(sum_each(first for _, first, _ in entries), sum_each(second for _, _, second in entries), strict=True)
    differing = (name for (name, _, _), (first, second) in zip(entries, pairs, strict=True) if first != second)
    return next((f"FP8 state of {name} was not restored" for name in differing), None)


def _common(
    saved: Mapping[str, Any], live: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    for key, value in saved.items():
        other, name = live.get(key), f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            yield from _common(value, other, name)
        elif isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
            yield name, value, other
