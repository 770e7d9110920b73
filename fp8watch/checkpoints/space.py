"""Checks at the start whether the disk has room for the checkpoints to be kept."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import torch

from fp8watch.checkpoints.config import Checkpoints
from fp8watch.checkpoints.parts import TrainingParts
from fp8watch.checkpoints.place import Place
from fp8watch.checkpoints.sharding import local_of

logger = logging.getLogger(__name__)

MOMENTS = 2
"""Assumed optimizer tensors per parameter, before the optimizer has state (Adam has 2)."""


def expected_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer, place: Place) -> int:
    """Estimated bytes of one checkpoint of all ranks: weights, buffers and optimizer state.

    A DTensor counts once as a whole; what each rank holds separately (pipeline stages) counts for each rank.
    """
    found, own = 0, 0
    tensors: list[tuple[torch.Tensor, int]] = [(buffer, 1) for buffer in model.buffers()]
    for parameter in model.parameters():
        state = optimizer.state.get(parameter)
        if state:
            tensors += [(value, 1) for value in state.values() if isinstance(value, torch.Tensor)]
        tensors.append((parameter, 1 if state or not parameter.requires_grad else 1 + MOMENTS))
    for tensor, times in tensors:
        size = times * tensor.numel() * tensor.element_size()
        found, own = (found + size, own) if hasattr(tensor, "placements") else (found, own + size)
    return found + own * (place.world_size if place.layout == "shards" else 1)


def shortage(root: Path, config: Checkpoints, one: int, held: int) -> str | None:
    """Why the disk is too small for the checkpoints that rotation keeps and the one being saved; None: it is not.

    `one`: bytes of one checkpoint. `held`: number of checkpoints there already. Raises `OSError`.
    """
    free = shutil.disk_usage(root).free
    # The newest good one may be kept beyond `keep`, and a new one is written before an old one is removed.
    wanted = max(1, config.keep + 2 - held)
    if wanted * one <= free:
        return None
    gib = 2.0**30
    return (
        f"checkpoints: {root} has {free / gib:.3g} GiB free, and {wanted} more of about {one / gib:.3g} GiB each are "
        f"to come (keep={config.keep}): saving will fail when it is full, and no rollback is possible from then on"
    )


def note(root: Path, config: Checkpoints, parts: TrainingParts, place: Place, *, held: int) -> str | None:
    """`shortage` for this run's checkpoints; None also if it is unknown."""
    try:
        also = [module for module in parts.also.values() if isinstance(module, torch.nn.Module)]
        tensors = [tensor for module in also for tensor in (*module.parameters(), *module.buffers())]
        times = place.world_size if place.layout == "shards" else 1
        more = times * sum(local_of(tensor).nbytes for tensor in tensors)
        return shortage(root, config, expected_bytes(parts.model, parts.optimizer, place) + more, held)
    except (OSError, RuntimeError) as error:  # a model on no device yet
        logger.debug("free space was not looked at: %s", error)
        return None
