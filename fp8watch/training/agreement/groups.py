"""Tensor-parallel and pipeline-parallel ranks, read from `mesh=` of attach.

Tensor-parallel ranks hold shards of one tensor. Under delayed scaling they have to use the same scale, and they have to
run a module in the same precision; `fp8watch.detect.rank_mismatch` compares what they report. Pipeline stages hold
different modules, so the global gradient norm is taken over all stages. Other dimensions (data, FSDP shards, context,
experts) are not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

TENSOR = frozenset({"tp", "tensor", "tensor_parallel", "mp", "model", "model_parallel"})
"""Names of tensor-parallel dimensions (torchtitan and Megatron Core: `tp`)."""
PIPELINE = frozenset({"pp", "pipe", "pipeline", "pipeline_parallel", "stage"})
"""Names of pipeline-parallel dimensions (torchtitan and Megatron Core: `pp`)."""
WANTED = (
    "a DeviceMesh with named dimensions is wanted, a process group of the ranks that share tensors, or a mapping from "
    'names to process groups ({"tp": ..., "pp": ...})'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups:
    """This rank's tensor-parallel group and pipeline stage."""

    tensor: tuple[int, ...] = ()
    """Global ranks of the tensor-parallel group, including this rank; empty: unknown, or this rank alone."""
    stage: int = 0
    """Index of this rank's pipeline stage."""
    stages: int = 1
    pipeline: Any | None = None
    """Process group over the stages (one rank of each); None: there is one stage."""
    remark: str = ""
    """Message to the user about what in `mesh=` is not used."""


ALONE = RankGroups()
"""No group is known."""


def read_groups(mesh: Any) -> RankGroups:
    """The groups in `mesh`. If part of it cannot be used, `remark` says why."""
    if mesh is None:
        return ALONE
    if not dist.is_available() or not dist.is_initialized():
        return RankGroups(remark="mesh= is not used: torch.distributed is not initialised")
    if type(mesh) is int and mesh == dist.GroupMember.NON_GROUP_MEMBER:  # `new_group` on a non-member
        return ALONE
    try:
        if isinstance(mesh, Mapping):
            return _of_named(mesh)
        if isinstance(mesh, dist.ProcessGroup):
            return RankGroups(tensor=_shared(_ranks(mesh)))
        if not isinstance(mesh, DeviceMesh):
            return RankGroups(remark=f"mesh= is not used: {WANTED}, got {type(mesh).__name__}")
        return _of_mesh(mesh)
    except (RuntimeError, ValueError) as error:  # torch cannot slice the mesh or give the group
        return RankGroups(remark=f"mesh= is not used: {error}")


def doubled_roles(mesh: Any) -> str | None:
    """The error in a mapping with two groups of the same role, which are ambiguous. None: no error, or no mapping.

    Two dimensions of a device mesh may both be tensor-parallel: they combine into one group.
    """
    if not isinstance(mesh, Mapping):
        return None
    try:
        given = [name for name, group in mesh.items() if _is_one(group)]
    except Exception as error:
        return f"its items cannot be read ({type(error).__name__}: {error})"
    for role, names in (("share tensors", TENSOR), ("are the stages of a pipeline", PIPELINE)):
        several = [repr(name) for name in given if isinstance(name, str) and name in names]
        if len(several) > 1:
            return f"{' and '.join(several)} both name the ranks that {role}: one of them is wanted"
    return None


def _is_one(group: Any) -> bool:
    """Whether this rank is a member of `group`."""
    return group is not None and not (type(group) is int and group == dist.GroupMember.NON_GROUP_MEMBER)


def _of_mesh(mesh: DeviceMesh) -> RankGroups:
    names = mesh.mesh_dim_names
    if names is None:
        return RankGroups(remark="mesh= is not used: its dimensions have no names (tp and pp are looked for)")
    place = mesh.get_coordinate()
    if place is None:
        return RankGroups(remark="mesh= is not used: this rank is not in it")
    found = mesh.mesh[tuple(slice(None) if name in TENSOR else at for name, at in zip(names, place, strict=True))]
    tensor = _shared([int(rank) for rank in found.flatten().tolist()])
    stages = [name for name in names if name in PIPELINE and mesh.size(names.index(name)) > 1]
    if len(stages) > 1:
        return RankGroups(tensor=tensor, remark=f"mesh: of the dimensions {', '.join(stages)} one can be the stages'")
    if not stages:
        return RankGroups(tensor=tensor)
    (name,) = stages
    index = names.index(name)
    return RankGroups(
        tensor=tensor, stage=place[index], stages=mesh.size(index), pipeline=mesh.get_group(name)
    )  # fmt: skip


def _of_named(groups: Mapping[Any, Any]) -> RankGroups:
    tensor: list[int] = []
    pipeline: Any | None = None
    unknown = []
    for name, given in groups.items():
        group = given.get_group() if isinstance(given, DeviceMesh) else given
        if name not in TENSOR | PIPELINE:
            unknown.append(str(name))
        elif not isinstance(group, dist.ProcessGroup):
            if group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER:
                unknown.append(f"{name} ({type(group).__name__}, which is no process group)")
        elif name in TENSOR:
            tensor += [rank for rank in _ranks(group) if rank not in tensor]
        else:
            pipeline = group
    remark = f"mesh: nothing is known of the groups {', '.join(unknown)} (tp and pp are looked for)" if unknown else ""
    if pipeline is None or dist.get_world_size(pipeline) == 1:
        return RankGroups(tensor=_shared(tensor), remark=remark)
    return RankGroups(
        tensor=_shared(tensor), stage=dist.get_rank(pipeline), stages=dist.get_world_size(pipeline),
        pipeline=pipeline, remark=remark,
    )  # fmt: skip


def _ranks(group: Any) -> list[int]:
    return [int(rank) for rank in dist.get_process_group_ranks(group)]


def _shared(ranks: list[int]) -> tuple[int, ...]:
    return tuple(sorted(ranks)) if len(ranks) > 1 else ()
