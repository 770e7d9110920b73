"""Restores a checkpoint of N ranks on M ranks: chooses the part that a rank reads and adapts it.

Not possible for sharded models saved with `torch.save`, nor if ranks had different optimizer or `also=` state. A rank r
without a part of its own reads that of rank r modulo N, but gets a new random state, so that no two ranks draw the same
numbers. Under a distributed sampler the samples consumed by all ranks are divided anew, rounded down: a few are seen
twice, none is left out. The position of other loaders cannot be divided, which is reported.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from fp8watch import rng
from fp8watch.checkpoints.manifest import Manifest
from fp8watch.checkpoints.place import Layout, Place
from fp8watch.errors import CheckpointError


def place_in(manifest: Manifest, rank: int, world_size: int) -> Place:
    """The place whose files this rank reads. Raises `CheckpointError` if this number of ranks cannot read the
    checkpoint."""
    if manifest.world_size == world_size:
        return Place(rank=rank, world_size=world_size, layout=manifest.layout)
    if manifest.layout == "shards" and manifest.storage == "torch":
        raise CheckpointError(
            f"{manifest.checkpoint}: sharded over {manifest.world_size} ranks, here are {world_size}; "
            'Checkpoints(format="dcp") can be read by another number of ranks'
        )
    for what, files in (
        ("optimizer state", {part.optimizer_file for part in manifest.ranks}),
        ("state given as also=", {part.also_file for part in manifest.ranks}),
    ):
        if len(files) > 1:
            raise CheckpointError(
                f"{manifest.checkpoint}: each of {manifest.world_size} ranks had {what} of its own, which cannot be "
                f"assigned to {world_size} ranks"
            )
    layout: Layout = manifest.layout
    return Place(rank=rank % manifest.world_size, world_size=manifest.world_size, layout=layout)


def optimizer_file(manifest: Manifest, place: Place) -> str:
    """The file with the optimizer of the rank at that place."""
    part = next((part for part in manifest.ranks if part.rank == place.rank), None)
    return (part.optimizer_file if part is not None else "") or place.optimizer_file()


def also_file(manifest: Manifest, place: Place) -> str:
    """The file with the `also=` objects of the rank at that place; empty: none."""
    if not manifest.ranks:
        return place.also_file() if "also" in manifest.parts else ""
    return next((part.also_file for part in manifest.ranks if part.rank == place.rank), "")


def adapt(state: dict[str, Any], manifest: Manifest, rank: int, world_size: int) -> list[str]:
    """Adapt a rank's state file in place to another number of ranks. Returns notes for the user."""
    saved = manifest.world_size
    if saved == world_size:
        return []
    notes = [f"{manifest.checkpoint} was saved by {saved} ranks, here are {world_size}"]
    if rank >= saved:
        state["rng"] = {**state["rng"], "host": fresh_random(state["rng"]["host"], rank)}
        state["rng"].pop("cuda", None)
        notes.append(f"rank {rank} did not exist when this was saved: it starts with a new random state")
    if "data" in state:
        notes.append(_deal_out(state["data"], saved, world_size))
    return notes


def fresh_random(host: rng.State, rank: int) -> rng.State:
    """Random state for a new rank, derived from that of a saved rank. The same at each resume."""
    content = host["torch"].numpy().tobytes() + rank.to_bytes(4, "big")
    seed = int.from_bytes(hashlib.sha256(content).digest()[:8], "big")
    now = rng.snapshot()
    try:
        torch.set_rng_state(torch.Generator().manual_seed(seed & 0x7FFF_FFFF_FFFF_FFFF).get_state())
        random.seed(seed)
        np.random.seed(seed & 0xFFFF_FFFF)
        return rng.snapshot()
    finally:
        rng.restore(now)


def _deal_out(data: dict[str, Any], saved: int, world_size: int) -> str:
    epoch_state = data.get("epoch_state")
    is_dealt = isinstance(epoch_state, dict) and epoch_state.get("sampler_epoch") is not None
    if not is_dealt or "index" not in data:
        if world_size > saved:
            return (
                "the data position cannot be divided among another number of ranks: each rank goes on from the "
                "position of one of the old ranks, and where ranks share the data, part of this epoch is never seen"
            )
        return "each rank goes on from the position of the same rank number; samples may be seen twice"
    data.pop("loader", None)  # a loader's own state is for the saved number of ranks
    for key in ("index", "samples", "skipped_samples"):
        data[key] = int(data.get(key, 0)) * saved // world_size
    return f"the epoch goes on after {data['index']} batches a rank"
