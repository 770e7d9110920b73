"""Converts DTensors to plain tensors, and back into the live layout.

A DTensor cannot be read with `weights_only` and includes its device mesh. Stored are this rank's shard, the full shape
and the placements. Shape and placements must be the same at the restore.
"""

from __future__ import annotations

from typing import Any

import torch

from fp8watch.errors import CheckpointError

MARK = "__shard__"


def is_sharded(value: Any) -> bool:
    """Whether a value is a DTensor."""
    return isinstance(value, torch.Tensor) and hasattr(value, "placements") and hasattr(value, "to_local")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, or the tensor itself. Shares its memory."""
    data: Any = tensor.detach()
    local: torch.Tensor = data.to_local() if is_sharded(data) else data
    return local


def to_shard(tensor: Any) -> dict[str, Any]:
    """A DTensor as tensors and plain values."""
    return {
        MARK: tensor.detach().to_local(),
        "shape": list(tensor.shape),
        "placements": [str(placement) for placement in tensor.placements],
    }


def is_shard(value: Any) -> bool:
    """Whether this was made by `to_shard`."""
    return isinstance(value, dict) and MARK in value


def from_shard(saved: dict[str, Any], like: Any, name: str) -> torch.Tensor:
    """A DTensor with the saved shard and the layout of `like`. Raises `CheckpointError` when the layouts differ."""
    if not is_sharded(like):
        raise CheckpointError(f"{name}: a part of a sharded tensor was saved, here it is whole")
    placements = [str(placement) for placement in like.placements]
    local = like.detach().to_local()
    found = saved[MARK]
    if saved["shape"] != list(like.shape) or saved["placements"] != placements or found.shape != local.shape:
        raise CheckpointError(
            f"{name}: {tuple(saved['shape'])} {', '.join(saved['placements'])}, of which this rank held "
            f"{tuple(found.shape)}, was saved; here it is {tuple(like.shape)} {', '.join(placements)}, "
            f"{tuple(local.shape)}"
        )
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        found.to(local.device), like.device_mesh, like.placements, run_check=False, shape=like.shape,
        stride=like.stride(),
    )  # fmt: skip
