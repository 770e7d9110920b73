"""State at the start of an epoch of a loader without `state_dict`: random generators and the sampler's epoch.

A new iterator under that state yields the same order. All functions may raise what the loader raises.
"""

from __future__ import annotations

from typing import Any

import torch

from fp8watch import rng

State = dict[str, Any]


def generators(loader: Any) -> list[torch.Generator]:
    """The user's own generators that the loader and its samplers draw from."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found: list[torch.Generator] = []
    for owner in owners:
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is known for known in found):
            found.append(generator)
    return found


def capture(loader: Any) -> State:
    """The current state as tensors and plain values. Call it before an iterator is made."""
    return {
        "rng": rng.snapshot(),
        "generators": [generator.get_state() for generator in generators(loader)],
        "made_iterator": getattr(loader, "_iterator", None) is None,
        **sampler_epoch_of(loader),
    }


def sampler_epoch_of(loader: Any) -> State:
    """The epoch given to the sampler's `set_epoch` (as `DistributedSampler` has); None: there is no such sampler."""
    sampler = getattr(loader, "sampler", None)
    sampler_epoch = getattr(sampler, "epoch", None)
    is_told_epochs = isinstance(sampler_epoch, int) and callable(getattr(sampler, "set_epoch", None))
    return {"sampler_epoch": sampler_epoch if is_told_epochs else None}


def set_sampler_epoch(loader: Any, state: State) -> None:
    """Set the sampler's epoch to that of `state`."""
    set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
    if state.get("sampler_epoch") is not None and set_epoch is not None:
        set_epoch(state["sampler_epoch"])


def restore(loader: Any, own: list[torch.Generator], state: State) -> None:
    """Restore a state; `own`: the loader's `generators`."""
    rng.restore(state["rng"])
    for generator, saved in zip(own, state["generators"], strict=False):
        generator.set_state(saved)
    set_sampler_epoch(loader, state)
