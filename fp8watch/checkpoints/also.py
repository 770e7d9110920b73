"""State of further objects that are saved and restored: those given to attach as `also=`, such as a moving average of
the weights, a second model or a second optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fp8watch.checkpoints import optimizer_state
from fp8watch.checkpoints.checksum import sum_nested
from fp8watch.checkpoints.plain import to_plain
from fp8watch.checkpoints.sharding import from_shard, is_shard
from fp8watch.errors import CheckpointError


def capture(objects: Mapping[str, Any]) -> dict[str, Any]:
    """The state of each object as plain values and tensors, which share the objects' memory. Raises `CheckpointError`
    naming a value that is neither."""
    return {name: to_plain(thing.state_dict(), f"also.{name}") for name, thing in objects.items()}


def check(objects: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Check that the saved state fits. Raises `CheckpointError`; changes nothing."""
    for name, thing in objects.items():
        if name not in saved:
            raise CheckpointError(f"saved without {name} (also=)")
        if isinstance(thing, torch.optim.Optimizer):
            optimizer_state.check(thing, saved[name])
            continue
        live = thing.state_dict()
        whole = _unsharded(saved[name], live, name)
        if isinstance(thing, torch.nn.Module) and _form(whole) != _form(live):
            differing = sorted(set(_form(whole).items()) ^ set(_form(live).items()), key=str)
            raise CheckpointError(f"{name} (also=) is another one, it differs in {differing[0][0]}")


def restore(objects: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Restore the saved state. Raises `CheckpointError` when a module differs from it afterwards, and whatever the
    objects raise."""
    for name, thing in objects.items():
        if isinstance(thing, torch.optim.Optimizer):
            optimizer_state.restore(thing, saved[name])
            thing.zero_grad(set_to_none=True)
            continue
        state = _unsharded(saved[name], thing.state_dict(), name)
        copies = isinstance(thing, torch.nn.Module) and type(thing).load_state_dict is torch.nn.Module.load_state_dict
        thing.load_state_dict(state if copies else _copied(state))
        if isinstance(thing, torch.nn.Module):
            thing.zero_grad(set_to_none=True)  # gradients belong to the abandoned timeline
            if sum_nested(to_plain(thing.state_dict(), name)) != sum_nested(saved[name]):
                raise CheckpointError(f"{name} (also=) does not hold what was saved")


def _form(state: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        for key, value in state.items()
    }


def _unsharded(saved: Any, live: Any, name: str) -> Any:
    """Turn shards into DTensors with the layout of `live`."""
    if is_shard(saved):
        return from_shard(saved, live, name)
    if isinstance(saved, dict):
        own = live if isinstance(live, Mapping) else {}
        for key, value in saved.items():
            if is_shard(value) and key not in own:
                raise CheckpointError(f"{name}.{key}: a part of a sharded tensor was saved, here is none")
        return type(saved)((key, _unsharded(value, own.get(key), f"{name}.{key}")) for key, value in saved.items())
    return saved


def _copied(value: Any) -> Any:
    """A copy, so that the object does not adopt a tensor of the file."""
    return optimizer_state.placed(value, None, None, steps_follow=False)
