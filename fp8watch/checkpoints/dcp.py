"""Model and optimizer through `torch.distributed.checkpoint`: shards that another number of ranks can read.

Tensors go by the name of their parameter, so that optimizer state finds its place under another sharding too. What is
read is read into copies, without a collective call (each rank plans its own reads from the metadata): a rank that
cannot read leaves nobody waiting, and live tensors are overwritten by `copy_` only when all is there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as torch_dcp

from fp8watch.checkpoints.dcp_reader import TensorReader
from fp8watch.checkpoints.files import measure
from fp8watch.checkpoints.manifest import FileEntry
from fp8watch.checkpoints.parts import TrainingParts
from fp8watch.checkpoints.place import Place, core
from fp8watch.checkpoints.plain import to_plain
from fp8watch.checkpoints.sharding import is_sharded, local_of
from fp8watch.checkpoints.storage import Poll, Restore
from fp8watch.errors import CheckpointError

logger = logging.getLogger(__name__)
FOLDER = "dcp"
_dcp: Any = torch_dcp
"""What torch gives incomplete types for."""


class DcpStorage:
    """See the module. `background`: from a copy, on a group and a thread of its own."""

    name = "dcp"
    writes_own_files = True

    def __init__(self, *, background: bool) -> None:
        self._background = background
        self._group: Any = None
        self._last: Any = None
        self._has_said = False

    def save(self, folder: Path, parts: TrainingParts, place: Place) -> Poll:
        """A collective call of all ranks."""
        if self._last is not None:
            self._last.exception()  # one at a time: its collective calls must not meet ours
            self._last = None
        target = folder / FOLDER
        target.mkdir(exist_ok=True)
        state = tensors_of(parts)
        is_alone = place.world_size == 1
        if not is_alone and self._group is None:
            self._group = dist.new_group(backend="gloo")
        writer = _dcp.FileSystemWriter(target, single_file_per_rank=True, sync_files=True)
        if not self._background:
            self._write(state, writer, is_alone=is_alone)
            return lambda: _own_files(target, place)
        copied = {name: _copy(tensor) for name, tensor in state.items()}
        self._say(sum(local_of(tensor).nbytes for tensor in copied.values()))
        future = self._last = _later(lambda: self._write(copied, writer, is_alone=is_alone))

        def poll() -> dict[str, FileEntry] | None:
            if not future.done():
                return None
            future.result()
            return _own_files(target, place)

        return poll

    def _write(self, state: dict[str, torch.Tensor], writer: Any, *, is_alone: bool) -> None:
        with _quietly():
            try:
                _dcp.save(state, storage_writer=writer, process_group=self._group, no_dist=is_alone)
            except _dcp.CheckpointException as error:  # is no Exception
                raise CheckpointError(str(error)) from error

    def _say(self, size: int) -> None:
        if not self._has_said:
            self._has_said = True
            logger.warning(
                "fp8watch: checkpoints in the background: a copy of %.1f MiB in memory while each is written",
                size / 2**20,
            )  # fmt: skip

    def kept(self, parts: TrainingParts) -> dict[str, Any]:
        """Groups of the optimizer, and which tensors belong to which parameter."""
        names = _names(parts)
        saved = parts.optimizer.state_dict()
        layout: dict[str, Any] = {}
        for index, state in saved["state"].items():
            entries = {}
            for key, value in state.items():
                if not isinstance(value, torch.Tensor):
                    entries[key] = {"value": to_plain(value, key)}
                else:
                    entries[key] = {"shape": list(value.shape), "dtype": value.dtype}
            layout[names[index]] = entries
        return {"groups": to_plain(saved["param_groups"], "optimizer"), "layout": layout}

    def load(self, folder: Path, parts: TrainingParts, kept: dict[str, Any]) -> Restore:
        """See `Storage`."""
        names = _names(parts)
        sizes = [len(group["params"]) for group in parts.optimizer.param_groups]
        if sizes != [len(group["params"]) for group in kept["groups"]] or set(kept["layout"]) - set(names):
            raise CheckpointError("the optimizer is another one: its groups or parameters differ")
        model = {f"model.{name}": p for name, p in core(parts.model).named_parameters()}
        wanted = {name: torch.empty_like(p.detach()) for name, p in model.items()}
        live = dict(zip(names, _parameters(parts), strict=True))
        for name, entries in kept["layout"].items():
            for key, entry in entries.items():
                if "shape" in entry:
                    wanted[f"optimizer.{name}.{key}"] = _empty(entry, live[name])
        try:
            with _quietly():
                _dcp.load(wanted, storage_reader=TensorReader(folder / FOLDER), no_dist=True)
        except (Exception, _dcp.CheckpointException) as error:  # a planner's, a reader's or a pickle's; no Exception
            raise CheckpointError(f"{folder.name}/{FOLDER} cannot be loaded: {error}") from error

        def restore() -> None:
            with torch.no_grad():
                for name, parameter in model.items():
                    parameter.copy_(wanted[name])
                _restore_optimizer(parts.optimizer, kept, wanted, live)

        return restore


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """torch warns of a call without a group, which is what is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def tensors_of(parts: TrainingParts) -> dict[str, torch.Tensor]:
    """All tensors of model and optimizer by name; they share the live ones' memory."""
    found = {f"model.{name}": p.detach() for name, p in core(parts.model).named_parameters()}
    names = _names(parts)
    for index, state in parts.optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found[f"optimizer.{names[index]}.{key}"] = value.detach()
    return found


def _parameters(parts: TrainingParts) -> list[torch.Tensor]:
    return [p for group in parts.optimizer.param_groups for p in group["params"]]


def _names(parts: TrainingParts) -> list[str]:
    """Name of each parameter in the optimizer's order."""
    by_id = {id(p): name for name, p in core(parts.model).named_parameters()}
    return [by_id.get(id(p), f"unnamed.{index}") for index, p in enumerate(_parameters(parts))]


def _empty(entry: dict[str, Any], owner: torch.Tensor) -> torch.Tensor:
    if entry["shape"] == list(owner.shape):
        return torch.empty_like(owner.detach(), dtype=entry["dtype"])
    return torch.empty(entry["shape"], dtype=entry["dtype"], device="cpu")


def _copy(tensor: torch.Tensor) -> Any:
    if not is_sharded(tensor):
        return tensor.to("cpu", copy=True)
    whole: Any = tensor
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        whole.to_local().clone(), whole.device_mesh, whole.placements, run_check=False, shape=whole.shape,
        stride=whole.stride(),
    )  # fmt: skip


def _restore_optimizer(
    optimizer: torch.optim.Optimizer, kept: dict[str, Any], found: dict[str, torch.Tensor], live: dict[str, Any]
) -> None:
    for name, parameter in live.items():
        entries = kept["layout"].get(name)
        if entries is None:
            optimizer.state.pop(parameter, None)
            continue
        state = optimizer.state[parameter]
        for key in [key for key in state if key not in entries]:
            del state[key]
        for key, entry in entries.items():
            value = found.get(f"optimizer.{name}.{key}")
            current = state.get(key)
            if value is None:
                state[key] = entry["value"]
            elif isinstance(current, torch.Tensor) and current.shape == value.shape:
                current.copy_(value)
            else:
                state[key] = value
    for group, saved in zip(optimizer.param_groups, kept["groups"], strict=True):
        for key, value in saved.items():
            if key == "params":
                continue
            if isinstance(group.get(key), torch.Tensor):
                group[key].copy_(torch.as_tensor(value, device=group[key].device))
            else:
                group[key] = value


def _own_files(target: Path, place: Place) -> dict[str, FileEntry]:
    """This rank's files; the metadata, written last, belong to the first."""
    own = [path for path in target.iterdir() if path.name.startswith(f"__{place.rank}_")]
    own += [path for path in target.iterdir() if path.name == ".metadata" and place.rank == 0]
    for path in own:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    return {f"{FOLDER}/{path.name}": measure(path) for path in own}


def _later(work: Any) -> Any:
    from concurrent.futures import Future
    from threading import Thread

    future: Any = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="fp8watch-save", daemon=True).start()
    return future
