"""Stores model and optimizer with `torch.distributed.checkpoint`, which another number of ranks can read.

Tensors are stored under the name of their parameter, so that optimizer state is found under another sharding too. torch
keeps one of several tensors with the same name. So a name under which ranks may hold different tensors gets a suffix: a
hash of the contents for a tensor that is not a DTensor (sharded by hand, an expert, local SGD), and of the ranks for a
DTensor on some ranks only. Equal tensors are stored once, and each rank finds its own.

Loading reads into copies and uses no collective (each rank plans its reads from the metadata), so a rank that fails
does not block the others. Live tensors are overwritten by `copy_` only when everything was read.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as torch_dcp

from fp8watch.checkpoints.aside import later
from fp8watch.checkpoints.checksum import sum_each
from fp8watch.checkpoints.dcp_reader import TensorReader
from fp8watch.checkpoints.files import measure
from fp8watch.checkpoints.manifest import FileEntry
from fp8watch.checkpoints.optimizer_state import placed, whose_steps_follow
from fp8watch.checkpoints.parts import TrainingParts
from fp8watch.checkpoints.place import Place, core
from fp8watch.checkpoints.plain import to_plain
from fp8watch.checkpoints.sharding import is_sharded, local_of
from fp8watch.checkpoints.storage import Poll, Prepared, Restore, Unfit
from fp8watch.errors import CheckpointError

logger = logging.getLogger(__name__)
FOLDER = "dcp"
VARIANT = "@"
"""Separates a tensor's name from its suffix."""
_dcp: Any = torch_dcp
"""Untyped, because torch's type hints for it are incomplete."""


class DcpStorage:
    """See the module's docstring. `background`: write a copy, on its own process group and thread."""

    name = "dcp"
    writes_own_files = True

    def __init__(self, *, background: bool) -> None:
        self._background = background
        self._group: Any = None
        self._last: Future[dict[str, FileEntry]] | None = None
        self._has_said = False

    def prepare(self, folder: Path, parts: TrainingParts, place: Place) -> Prepared:
        """See `Storage`."""
        if self._last is not None:
            self._last.exception()  # one at a time: its collectives must not mix with ours
            self._last = None
        target = folder / FOLDER
        target.mkdir(exist_ok=True)
        kept = self.kept(parts)
        variants = kept["variants"]
        state = {variants.get(name, name): tensor for name, tensor in tensors_of(parts).items()}
        is_alone = place.world_size == 1
        writer = _dcp.FileSystemWriter(target, single_file_per_rank=True, sync_files=True)
        if not self._background:
            return Prepared(kept=kept, begin=lambda: self._in_front(state, writer, target, place))
        # A DTensor keeps its mesh, and its shard is in host memory too.
        copied = {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}

        def work() -> dict[str, FileEntry]:
            self._write(copied, writer, is_alone=is_alone)
            return _own_files(target, place)

        # Start the thread before any rank begins: a rank without one must not block the others.
        may_begin = threading.Event()
        future = later(work, after=may_begin)

        def begin() -> Poll:
            try:
                self._meet(is_alone=is_alone)
            except BaseException:
                cancel()
                raise
            self._say(sum(local_of(tensor).nbytes for tensor in copied.values()))
            self._last = future
            may_begin.set()
            return lambda: future.result() if future.done() else None

        def cancel() -> None:
            future.cancel()
            may_begin.set()

        return Prepared(kept=kept, begin=begin, cancel=cancel)

    def _in_front(self, state: dict[str, torch.Tensor], writer: Any, target: Path, place: Place) -> Poll:
        is_alone = place.world_size == 1
        self._meet(is_alone=is_alone)
        self._write(state, writer, is_alone=is_alone)
        return lambda: _own_files(target, place)

    def _meet(self, *, is_alone: bool) -> None:
        if not is_alone and self._group is None:
            self._group = dist.new_group(backend="gloo")

    def _write(self, state: dict[str, torch.Tensor], writer: Any, *, is_alone: bool) -> None:
        with _quietly():
            try:
                _dcp.save(state, storage_writer=writer, process_group=self._group, no_dist=is_alone)
            except _dcp.CheckpointException as error:  # not a subclass of Exception
                raise CheckpointError(str(error)) from error

    def _say(self, size: int) -> None:
        if not self._has_said:
            self._has_said = True
            logger.warning(
                "fp8watch: checkpoints in the background: a copy of %.1f MiB in memory while each is written",
                size / 2**20,
            )  # fmt: skip

    def kept(self, parts: TrainingParts) -> dict[str, Any]:
        """The optimizer's groups, the layout of its state per parameter, and the names with suffixes (`variants`)."""
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
        return {
            "groups": to_plain(saved["param_groups"], "optimizer"), "layout": layout, "variants": _variants(parts),
        }  # fmt: skip

    def load(self, folder: Path, parts: TrainingParts, kept: dict[str, Any], *, is_same_world: bool = True) -> Restore:
        """See `Storage`."""
        names = _names(parts)
        sizes = [len(group["params"]) for group in parts.optimizer.param_groups]
        if sizes != [len(group["params"]) for group in kept["groups"]] or set(kept["layout"]) - set(names):
            raise Unfit("the optimizer is another one: its groups or parameters differ")
        variants: dict[str, str] = kept.get("variants", {})
        model = {f"model.{name}": p for name, p in core(parts.model).named_parameters()}
        wanted: dict[str, torch.Tensor] = {name: torch.empty_like(p.detach()) for name, p in model.items()}
        live = dict(zip(names, _parameters(parts), strict=True))
        for name, entries in kept["layout"].items():
            for key, entry in entries.items():
                if "shape" in entry:
                    wanted[f"optimizer.{name}.{key}"] = _empty(entry, live[name])
        try:
            reader = TensorReader(folder / FOLDER)
            own = None if is_same_world else _held_by_some(reader.read_metadata().state_dict_metadata)
            if own is not None:
                raise Unfit(f"{own} differed between ranks when it was saved, and there are more or fewer ranks now")
            with _quietly():
                named = {variants.get(name, name): tensor for name, tensor in wanted.items()}
                _dcp.load(named, storage_reader=reader, no_dist=True)
        except Unfit:
            raise
        except (Exception, _dcp.CheckpointException) as error:  # planner, reader or pickle; no Exception
            raise CheckpointError(f"{folder.name}/{FOLDER} cannot be loaded: {error}") from error

        def restore() -> None:
            with torch.no_grad():
                for name, parameter in model.items():
                    parameter.copy_(wanted[name])
                _restore_optimizer(parts.optimizer, kept, wanted, live)

        return restore


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppress torch's warning about a call without a process group, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def tensors_of(parts: TrainingParts) -> dict[str, torch.Tensor]:
    """All tensors of model and optimizer by name. They share the live tensors' memory."""
    found = {f"model.{name}": p.detach() for name, p in core(parts.model).named_parameters()}
    names = _names(parts)
    for index, state in parts.optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found[f"optimizer.{names[index]}.{key}"] = value.detach()
    return found


def _variants(parts: TrainingParts) -> dict[str, str]:
    """Name of a tensor -> name with suffix, where ranks may hold different tensors under that name."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks == 1:
        return {}
    tensors = tensors_of(parts)
    plain = {name: tensor for name, tensor in tensors.items() if not is_sharded(tensor)}
    try:
        found = dict(zip(plain, sum_each(plain.values()), strict=True))
    except (RuntimeError, TypeError, NotImplementedError):  # a type of tensor that cannot be summed
        found = dict.fromkeys(plain, f"rank-{dist.get_rank()}")
    for name in tensors.keys() - plain.keys():
        mesh: Any = tensors[name]
        held_by = sorted(mesh.device_mesh.mesh.flatten().tolist())
        if len(held_by) < ranks:
            found[name] = hashlib.blake2b(repr(held_by).encode(), digest_size=8).hexdigest()
    return {name: f"{name}{VARIANT}{which}" for name, which in found.items()}


def _held_by_some(names: Iterable[str]) -> str | None:
    """The first tensor that differed between the ranks that saved it, if any."""
    seen: set[str] = set()
    for name in names:
        base, mark, _ = name.rpartition(VARIANT)
        if mark and base in seen:
            return base
        seen.add(base)
    return None


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


def _restore_optimizer(
    optimizer: torch.optim.Optimizer, kept: dict[str, Any], found: dict[str, torch.Tensor], live: dict[str, Any]
) -> None:
    capturable = whose_steps_follow(optimizer)
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
            if value is not None and isinstance(current, torch.Tensor) and current.shape == value.shape:
                current.copy_(value)
            else:
                value = entry["value"] if value is None else value
                state[key] = placed(value, key, parameter, steps_follow=parameter in capturable)
    for group, saved in zip(optimizer.param_groups, kept["groups"], strict=True):
        for key, value in saved.items():
            if key == "params":
                continue
            if isinstance(group.get(key), torch.Tensor):
                group[key].copy_(torch.as_tensor(value, device=group[key].device))
            else:
                group[key] = value


def _own_files(target: Path, place: Place) -> dict[str, FileEntry]:
    """This rank's files. The metadata file, written last, belongs to rank 0."""
    own = [path for path in target.iterdir() if path.name.startswith(f"__{place.rank}_")]
    own += [path for path in target.iterdir() if path.name == ".metadata" and place.rank == 0]
    for path in own:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    return {f"{FOLDER}/{path.name}": measure(path) for path in own}
