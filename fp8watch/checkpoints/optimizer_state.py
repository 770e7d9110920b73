"""An optimizer's state, put back in place.

`Optimizer.load_state_dict` replaces every state tensor and parameter group by a new object, which breaks
captured graphs, and LR tensors that a scheduler or a compiled step holds. Here live tensors are overwritten by
`copy_`, state made after the checkpoint is dropped, and group objects stay what they are.
"""

from __future__ import annotations

from typing import Any

import torch

from fp8watch.checkpoints.sharding import from_shard, is_shard
from fp8watch.errors import CheckpointError


def uses_own_loading(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer keeps state that only its own `load_state_dict` understands."""
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
    """Whether the saved state fits the optimizer. Raises `CheckpointError`; nothing is changed."""
    groups, saved_groups = optimizer.param_groups, saved["param_groups"]
    sizes = [len(group["params"]) for group in groups]
    saved_sizes = [len(group["params"]) for group in saved_groups]
    if sizes != saved_sizes:
        raise CheckpointError(f"optimizer groups of {saved_sizes} parameters were saved, here are {sizes}")
    live = _live(optimizer)
    for index, state in saved["state"].items():
        if not isinstance(index, int) or index >= len(live):
            continue
        for key, value in state.items():
            if is_shard(value):
                from_shard(value, live[index], f"optimizer state {key!r} of parameter {index}")
                continue
            current = optimizer.state.get(live[index], {}).get(key)
            if isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor) and value.shape != current.shape:
                raise CheckpointError(
                    f"optimizer state {key!r} of parameter {index}: {tuple(value.shape)} was saved, "
                    f"here is {tuple(current.shape)}"
                )


def restore(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Put the saved state (the form of `Optimizer.state_dict`) back. Call `check` first."""
    if uses_own_loading(optimizer):
        # Copies: a tensor of the file must not become one of the optimizer.
        optimizer.load_state_dict(_copied(_unsharded(saved, optimizer)))
        return
    live = _live(optimizer)
    with torch.no_grad():
        kept: set[Any] = set()
        for index, state in saved["state"].items():
            owner = live[index] if isinstance(index, int) and index < len(live) else index
            kept.add(owner)
            if isinstance(state, dict):
                _restore_values(optimizer.state[owner], state, owner)
            else:
                optimizer.state[owner] = state
        for owner in [owner for owner in optimizer.state if owner not in kept]:
            del optimizer.state[owner]
        for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            _restore_values(group, {key: value for key, value in saved_group.items() if key != "params"}, None, group)


def _restore_values(
    target: dict[Any, Any], saved: dict[Any, Any], owner: Any, group: dict[str, Any] | None = None
) -> None:
    for key, value in saved.items():
        current = target.get(key)
        if is_shard(value):
            value = from_shard(value, owner, f"optimizer state {key!r}")
        if isinstance(value, torch.Tensor):
            if isinstance(current, torch.Tensor) and current.shape == value.shape and current.dtype == value.dtype:
                current.copy_(value)
            else:
                # Step counters lie on the CPU unless the optimizer is capturable; moments lie with the parameter.
                follows = isinstance(owner, torch.Tensor) and (value.dim() > 0 or value.shape == owner.shape)
                target[key] = value.to(owner.device, copy=True) if follows else value.clone()
        elif isinstance(current, torch.Tensor) and isinstance(value, int | float):
            current.fill_(value)
        else:
            target[key] = value
    if group is None:
        for key in [key for key in target if key not in saved]:
            del target[key]


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value


def _live(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _unsharded(saved: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    live = _live(optimizer)
    state = {
        index: {
            key: from_shard(value, live[index], f"optimizer state {key!r}") if is_shard(value) else value
            for key, value in entry.items()
        }
        if isinstance(entry, dict)
        else entry
        for index, entry in saved["state"].items()
    }
    return {**saved, "state": state}
