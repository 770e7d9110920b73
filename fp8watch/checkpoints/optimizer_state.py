"""Restores an optimizer's state in place.

`Optimizer.load_state_dict` replaces every state tensor and parameter group. This breaks captured CUDA graphs, and LR
tensors held by a scheduler or a compiled step. Here live tensors are overwritten by `copy_`, state created after the
checkpoint is removed, and the group objects stay the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch

from fp8watch.checkpoints.sharding import from_shard, is_shard
from fp8watch.errors import CheckpointError


def uses_own_loading(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer has its own `load_state_dict`, `state_dict` or hooks for them, which must then be used."""
    own = type(optimizer)
    has_hooks = bool(
        getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None)
        or getattr(optimizer, "_optimizer_load_state_dict_post_hooks", None)
        or getattr(optimizer, "_optimizer_state_dict_post_hooks", None)
    )
    return (
        has_hooks
        or own.load_state_dict is not torch.optim.Optimizer.load_state_dict
        or own.state_dict is not torch.optim.Optimizer.state_dict
    )


def check(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Check that the saved state fits the optimizer. Raises `CheckpointError`; changes nothing."""
    groups, saved_groups = optimizer.param_groups, saved["param_groups"]
    sizes = [len(group["params"]) for group in groups]
    saved_sizes = [len(group["params"]) for group in saved_groups]
    if sizes != saved_sizes:
        raise CheckpointError(f"optimizer groups of {saved_sizes} parameters were saved, here are {sizes}")
    live = _live(optimizer)
    for index, state in saved["state"].items():
        if not isinstance(index, int) or index >= len(live):
            continue
        if not isinstance(state, dict):
            continue
        for key, value in state.items():
            for shard in _shards_in(value):
                from_shard(shard, live[index], f"optimizer state {key!r} of parameter {index}")
            current = optimizer.state.get(live[index], {}).get(key)
            if isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor) and value.shape != current.shape:
                raise CheckpointError(
                    f"optimizer state {key!r} of parameter {index}: {tuple(value.shape)} was saved, "
                    f"here is {tuple(current.shape)}"
                )


def restore(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Restore a saved state (in the format of `Optimizer.state_dict`). Call `check` first."""
    if uses_own_loading(optimizer):
        # A copy, so that the optimizer does not adopt a tensor of the file.
        optimizer.load_state_dict(placed(_unsharded(saved, optimizer), None, None, steps_follow=False))
        return
    live = _live(optimizer)
    capturable = whose_steps_follow(optimizer)
    with torch.no_grad():
        kept: set[Any] = set()
        for index, state in saved["state"].items():
            owner = live[index] if isinstance(index, int) and index < len(live) else index
            kept.add(owner)
            if isinstance(state, dict):
                _restore_values(optimizer.state[owner], state, owner, steps_follow=owner in capturable)
            else:
                optimizer.state[owner] = state
        for owner in [owner for owner in optimizer.state if owner not in kept]:
            del optimizer.state[owner]
        for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            _restore_values(group, {key: value for key, value in saved_group.items() if key != "params"}, None)


def _restore_values(target: dict[Any, Any], saved: dict[Any, Any], owner: Any, *, steps_follow: bool = False) -> None:
    """`owner`: the parameter that the state belongs to; None: a group, whose unsaved entries are kept."""
    for key, value in saved.items():
        current: Any = target.get(key)
        if is_shard(value):
            value = from_shard(value, owner, f"optimizer state {key!r}")
        if _is_alike(current, value):
            current.copy_(value)
        elif isinstance(current, torch.Tensor) and isinstance(value, int | float):
            current.fill_(value)
        else:
            target[key] = placed(value, key, owner, steps_follow=steps_follow)
    if owner is not None:
        for key in [key for key in target if key not in saved]:
            del target[key]


def _is_alike(current: Any, value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not isinstance(current, torch.Tensor):
        return False
    return (current.shape, current.dtype) == (value.shape, value.dtype)


def placed(value: Any, key: Any, owner: Any, *, steps_follow: bool) -> Any:
    """A copy of a saved value with its tensors on the device where torch's `load_state_dict` puts them, at any depth of
    lists and dicts: the parameter's device. Step counters only move there with `steps_follow` (a capturable or fused
    optimizer)."""
    if is_shard(value):
        return from_shard(value, owner, f"optimizer state {key!r}")
    if isinstance(value, torch.Tensor):
        follows = isinstance(owner, torch.Tensor) and (key != "step" or steps_follow)
        return value.to(owner.device, copy=True) if follows else value.clone()
    if isinstance(value, dict):
        pairs = ((name, placed(item, name, owner, steps_follow=steps_follow)) for name, item in value.items())
        return OrderedDict(pairs) if isinstance(value, OrderedDict) else dict(pairs)
    if type(value) in (list, tuple, set):
        return type(value)(placed(item, None, owner, steps_follow=steps_follow) for item in value)
    return value


def whose_steps_follow(optimizer: torch.optim.Optimizer) -> set[torch.Tensor]:
    """Parameters whose step counters are on their device."""
    groups = [group for group in optimizer.param_groups if group.get("capturable") or group.get("fused")]
    return {parameter for group in groups for parameter in group["params"]}


def _shards_in(value: Any) -> Iterator[dict[str, Any]]:
    if is_shard(value):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _shards_in(item)


def _live(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _unsharded(saved: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    live = _live(optimizer)
    state = {
        index: {
            key: placed(value, key, live[index], steps_follow=False) if any(_shards_in(value)) else value
            for key, value in entry.items()
        }
        if isinstance(entry, dict) and isinstance(index, int) and index < len(live)
        else entry
        for index, entry in saved["state"].items()
    }
    return {**saved, "state": state}
