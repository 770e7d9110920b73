"""Which ranks belong together: what `mesh=` of attach says of how the model is cut up.

Ranks of tensor parallelism hold parts of one tensor, so that under delayed scaling they have to use one scale and to
run a module in the same precision; `fp8watch.detect.rank_mismatch` compares what they report. Pipeline stages hold
different modules, so that the norm of all gradients is that of all stages together. Every other dimension (data,
sharded data, context, experts) tells us nothing that is not seen already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

TENSOR = frozenset({"tp", "tensor", "tensor_parallel", "mp", "model", "model_parallel"})
"""Names of dimensions whose ranks hold parts of one tensor (torchtitan and Megatron Core: `tp`)."""
PIPELINE = frozenset({"pp", "pipe", "pipeline", "pipeline_parallel", "stage"})
"""Names of dimensions whose ranks hold different stages (torchtitan and Megatron Core: `pp`)."""
WANTED = (
    "a DeviceMesh with named dimensions is wanted, a process group of the ranks that share tensors, or a mapping from "
    'names to process groups ({"tp": ..., "pp": ...})'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups:
    """Where this rank stands."""

    tensor: tuple[int, ...] = ()
    """Global ranks that hold parts of the same tensors, this one among them; empty: not told, or alone."""
    stage: int = 0
    """Which pipeline stage this rank holds."""
    stages: int = 1
    pipeline: Any | None = None
    """Process group over the stages (one rank of each); None: there is one stage."""
    remark: str = ""
    """What of `mesh=` is not used, for the person who trains."""


ALONE = RankGroups()
"""Nothing is known."""


def read_groups(mesh: Any) -> RankGroups:
    """What a `mesh=` says; of what cannot be used, `remark` says why."""
    if mesh is None:
        return ALONE
    if not dist.is_available() or not dist.is_initialized():
        return RankGroups(remark="mesh= is not used: torch.distributed is not initialised")
    if type(mesh) is int and mesh == dist.GroupMember.NON_GROUP_MEMBER:  # what `new_group` gives a rank outside of it
        return ALONE
    try:
        if isinstance(mesh, Mapping):
            return _of_named(mesh)
        if isinstance(mesh, dist.ProcessGroup):
            return RankGroups(tensor=_shared(_ranks(mesh)))
        if not isinstance(mesh, DeviceMesh):
            return RankGroups(remark=f"mesh= is not used: {WANTED}, got {type(mesh).__name__}")
        return _of_mesh(mesh)
    except (RuntimeError, ValueError) as error:  # slices and groups that torch does not give
        return RankGroups(remark=f"mesh= is not used: {error}")


def doubled_roles(mesh: Any) -> str | None:
    """Why a mapping is not one way to cut a model up: two groups go by names of the same role. None: it is, or is none.

    Of a device mesh two dimensions may well share tensors; of two process groups nobody can tell which is meant.
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
    """Whether this rank is in the group that stands there."""
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
