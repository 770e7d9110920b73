"""How a run's state is distributed over its ranks, and the names of their files.

- `whole`: one process.
- `replicas`: data-parallel copies. Rank 0 saves the model for all; every rank saves its own state (random state, data
position, buffers). Optimizers may differ (distributed Muon, hand-made ZeRO-1): an optimizer's file is named by its
contents, so equal ones are saved once, by the first rank to write it.
- `shards`: every rank saves all that it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from fp8watch.checkpoints.sharding import is_sharded
from fp8watch.errors import CheckpointError


class Unsupported(CheckpointError):
    """No checkpoint format of fp8watch can hold this model or optimizer."""


Layout = Literal["whole", "replicas", "shards"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One rank's place in a checkpoint."""

    rank: int = 0
    world_size: int = 1
    layout: Layout = "whole"

    @property
    def model_file(self) -> str:
        """File of this rank's model."""
        return f"model-{self.rank:05d}.pt" if self.layout == "shards" else "model.pt"

    def optimizer_file(self, contents: str = "") -> str:
        """File of this rank's optimizer. `contents`: hash of its state; empty: the file shared by all replicas."""
        if self.layout == "replicas" and contents:
            return f"optimizer-{contents}.pt"
        return f"optimizer-{self.rank:05d}.pt" if self.layout == "shards" else "optimizer.pt"

    def also_file(self, contents: str = "") -> str:
        """File of the `also=` objects; see `optimizer_file`."""
        if self.layout == "replicas" and contents:
            return f"also-{contents}.pt"
        return "also.pt" if self.layout == "whole" else f"also-{self.rank:05d}.pt"

    @property
    def state_file(self) -> str:
        """File of this rank's own state."""
        return "state.pt" if self.layout == "whole" else f"state-{self.rank:05d}.pt"

    @property
    def part_file(self) -> str:
        """File that tells rank 0 during a save that this rank's files are durable, or why they are not."""
        return f"part-{self.rank:05d}.json"

    @property
    def saves_weights(self) -> bool:
        """Whether this rank saves the model."""
        return self.layout != "replicas" or self.rank == 0


def layout_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, world_size: int) -> Layout:
    """The layout of the state. Unless ranks are known to hold replicas, each saves its own."""
    if world_size == 1:
        return "whole"
    tensors = [*model.parameters(), *(p for group in optimizer.param_groups for p in group["params"])]
    if any(is_sharded(tensor) for tensor in tensors):
        return "shards"
    if isinstance(model, DistributedDataParallel) and model.process_group.size() == world_size:
        return "replicas"
    return "shards"


def unsupported(model: torch.nn.Module, optimizer: torch.optim.Optimizer, world_size: int) -> str | None:
    """Why the ranks' states cannot be saved separately; None: they can."""
    if world_size == 1:
        return None
    if hasattr(optimizer, "consolidate_state_dict"):
        return f"{type(optimizer).__name__} gives its state to one rank only; give Checkpoints save= and load="
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        return "FullyShardedDataParallel gathers its state in collectives; use fully_shard, or give save= and load="
    return None


def core(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside a DistributedDataParallel, so that names do not depend on the wrapper."""
    inner: Any = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(inner, torch.nn.Module)
    return inner
