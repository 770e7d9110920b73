"""Who this process is: run name, rank and place, with the same run name on all ranks of a job.

An argument wins over `FP8WATCH_RUN`, and that wins over the launcher's own name for the job. Without any of them a name
is made from the date and a random suffix. With several ranks and no name from the launcher, all ranks use rank 0's:
over `torch.distributed` when it is initialised, else derived from what all ranks have in common.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
MAX_NAME_LENGTH = 64
"""A run name is a label value, a folder and part of a socket path (which ends at 108 bytes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One rank of one run."""

    run: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    node_rank: int = 0
    host: str = ""
    pid: int = 0
    origin: str = "made up"
    """Source of the run name: argument, FP8WATCH_RUN, torchrun, kubeflow, slurm, rank 0, made up."""


def sanitize(name: str) -> str:
    """A run name usable as label, folder and file name: `[A-Za-z0-9._-]`, at most 64 characters, never empty."""
    cleaned = _UNSAFE.sub("-", name).strip("-.")[:MAX_NAME_LENGTH]
    return cleaned or "run"


def identify(
    run: str | None = None, configured: str | None = None, environ: Mapping[str, str] | None = None
) -> Identity:
    """The identity of this process; `run` is the argument of attach, `configured` the setting `FP8WATCH_RUN`.

    With an initialised process group of several ranks and no name given, this is a collective call.
    """
    env = os.environ if environ is None else environ
    rank, local_rank, world_size, node_rank = _ranks(env)
    group = _process_group()
    if group is not None:
        rank, world_size = group.get_rank(), group.get_world_size()
    name, origin = _name(run, configured, env, world_size)
    if origin == "made up" and world_size > 1:
        name, origin = _agree(name, group, env)
    return Identity(
        run=sanitize(name), rank=rank, local_rank=local_rank, world_size=world_size, node_rank=node_rank,
        host=socket.gethostname(), pid=os.getpid(), origin=origin,
    )  # fmt: skip


def _number(env: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        value = env.get(name, "")
        if value.isdigit():
            return int(value)
    return None


def _ranks(env: Mapping[str, str]) -> tuple[int, int, int, int]:
    """(rank, local_rank, world_size, node_rank) from torchrun's variables, else from those of a Slurm step.

    `SLURM_STEP_NUM_TASKS`, not `SLURM_NTASKS`: the latter is also set in a batch script, where one process runs.
    """
    if _number(env, "WORLD_SIZE") is not None and _number(env, "RANK") is not None:
        world = _number(env, "WORLD_SIZE") or 1
        node = _number(env, "GROUP_RANK", "PET_NODE_RANK", "NODE_RANK") or 0
        return _number(env, "RANK") or 0, _number(env, "LOCAL_RANK") or 0, max(world, 1), node
    tasks = _number(env, "SLURM_STEP_NUM_TASKS")
    if tasks is not None and tasks > 1:
        return (
            _number(env, "SLURM_PROCID") or 0,
            _number(env, "SLURM_LOCALID") or 0,
            tasks,
            _number(env, "SLURM_NODEID") or 0,
        )
    return 0, 0, 1, _number(env, "PET_NODE_RANK", "SLURM_NODEID") or 0


def _name(run: str | None, configured: str | None, env: Mapping[str, str], world_size: int) -> tuple[str, str]:
    if run:
        return run, "argument"
    if configured:
        return configured, "FP8WATCH_RUN"
    elastic = env.get("TORCHELASTIC_RUN_ID", "")
    if elastic and elastic != "none":
        return elastic, "torchrun"
    # Kubeflow Trainer names its pods <trainjob>-node-<i>-<j>.<trainjob>, and torchrun passes the address on.
    address = env.get("PET_MASTER_ADDR", "")
    if "." in address:
        return address.split(".")[1], "kubeflow"
    if env.get("SLURM_JOB_ID"):
        step = env.get("SLURM_STEP_ID", "")
        in_step = _number(env, "SLURM_STEP_NUM_TASKS") is not None and step.isdigit()
        return "slurm-" + env["SLURM_JOB_ID"] + (f".{step}" if in_step else ""), "slurm"
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}", "made up"


def _process_group() -> Any:
    """`torch.distributed` when it is loaded and initialised."""
    module = sys.modules.get("torch.distributed")
    if module is None or not module.is_available() or not module.is_initialized():
        return None
    return module


def _agree(name: str, group: Any, env: Mapping[str, str]) -> tuple[str, str]:
    if group is not None:
        box: list[Any] = [name]
        group.broadcast_object_list(box, src=0)
        return str(box[0]), "rank 0"
    shared = "|".join(env.get(key, "") for key in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"))
    digest = hashlib.sha256(shared.encode()).hexdigest()[:6]
    return f"{datetime.now(UTC):%Y%m%d}-{digest}", "launcher address"
