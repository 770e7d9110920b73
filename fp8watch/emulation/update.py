"""One scale update of one direction for a set of modules: reduce the amaxes, tell the taps, update the states.

All amaxes of a recipe and process group are reduced in one MAX all-reduce, as in Transformer Engine. Every rank must
pass the same modules in the same order. A module that did not run contributes 0 and keeps its state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fp8watch.emulation import checks
from fp8watch.emulation.taps import all_taps

if TYPE_CHECKING:
    from fp8watch.emulation.linear import Fp8Linear
    from fp8watch.emulation.scaling import ScalingState


class AmaxGroup:
    """Holds the process group of a module. Deep copies share it, pickles drop it (None: all ranks)."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        checks.group("amax_group", group)
        self.group = group

    def __deepcopy__(self, memo: dict[int, object]) -> AmaxGroup:
        return self

    def __reduce__(self) -> tuple[type[AmaxGroup], tuple[None]]:
        return AmaxGroup, (None,)


def state_of(module: Fp8Linear, *, is_forward: bool) -> ScalingState:
    """The module's scaling state of one direction."""
    return module.scaling_forward if is_forward else module.scaling_backward


@torch.no_grad()
def update_scales(modules: Sequence[Fp8Linear], *, is_forward: bool) -> None:
    """Update the scales of these modules in one direction, from the amaxes recorded since the last update."""
    batches: dict[tuple[int, int, torch.device], list[Fp8Linear]] = {}
    for module in modules:
        key = (id(module.recipe), id(module.amax_group.group), module.scaling_forward.scale.device)
        batches.setdefault(key, []).append(module)
    for batch in batches.values():
        _update_batch(batch, is_forward=is_forward)


def _update_batch(modules: list[Fp8Linear], *, is_forward: bool) -> None:
    recipe = modules[0].recipe
    states = [state_of(module, is_forward=is_forward) for module in modules]
    amax = torch.cat([state.amax_history[0] for state in states])
    if recipe.reduce_amax and dist.is_available() and dist.is_initialized():
        group = modules[0].amax_group.group
        if dist.get_world_size(group) > 1:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    taps = all_taps()
    if taps:
        scale = torch.cat([state.scale for state in states])
        for tap in taps:
            tap.on_update(modules, is_forward=is_forward, amax=amax, scale=scale)
    sizes = [len(state.tensors) for state in states]
    for state, own in zip(states, torch.split_with_sizes(amax, sizes), strict=True):
        state.newest_amax.copy_(torch.where(own != 0, own, state.newest_amax))
        state.update(recipe, own)
