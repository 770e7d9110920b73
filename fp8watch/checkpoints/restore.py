"""Loads and restores a checkpoint in place. Everything is checked before anything is overwritten."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fp8watch.checkpoints import also, contents, elastic, manifest, optimizer_state, rng, te_extra
from fp8watch.checkpoints.bit_sums import LATEST
from fp8watch.checkpoints.checksum import parameter_checksum
from fp8watch.checkpoints.files import check_sizes, is_on_network, verify
from fp8watch.checkpoints.fp8_state import form_differs, not_restored
from fp8watch.checkpoints.manifest import FileEntry, Manifest, RankPart
from fp8watch.checkpoints.parts import TrainingParts
from fp8watch.checkpoints.place import core
from fp8watch.checkpoints.sharding import from_shard, is_shard
from fp8watch.checkpoints.storage import Restore, Storage
from fp8watch.checkpoints.storage import Unfit as Unfit
from fp8watch.errors import CheckpointError


class PartlyRestored(CheckpointError):
    """Restoring failed after overwriting had begun. The live state is mixed and must not be trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checkpoint that was read and found intact, as far as this rank needs it."""

    manifest: Manifest
    model: dict[str, Any]
    """`state` and `buffers`, without parameters if the storage has its own files."""
    optimizer: dict[str, Any] | None
    state: dict[str, Any]
    world_size: int
    """Number of ranks now."""
    part: RankPart | None = None
    """What this rank had saved; None: it did not exist, or there was only one rank."""
    restore_weights: Restore | None = None
    also: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What a restore did."""

    checkpoint: str
    """The restored checkpoint: an older one than requested if that was damaged."""
    step: int
    attempt: int
    """The attempt it was saved in."""
    samples: int
    """Samples consumed by this rank up to the checkpoint; 0 without data position."""
    data_restored: bool
    parameter_checksum: str
    learning_rate: list[float]
    restored: list[str]
    refused: dict[str, str] = field(default_factory=dict)
    """Damaged checkpoints and what is wrong with each."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user."""


def load_verified(
    folder: Path, parts: TrainingParts, storage: Storage, *, rank: int, world_size: int, is_quick: bool = False
) -> Loaded:
    """Read and check what this rank needs. Overwrites nothing. `is_quick`: verify the quick sums, not SHA-256.

    Raises `CheckpointError` when a file is missing, damaged or not plain data, and `Unfit` when the checkpoint is
    intact but does not fit here.
    """
    described = manifest.read(folder)
    if (spoilt := manifest.spoilt(described)) is not None:
        raise CheckpointError(f"{folder.name}: {spoilt}")
    if described.storage != storage.name:
        raise Unfit(f"{folder.name}: written by {described.storage}, here {storage.name} is in use")
    try:
        place = elastic.place_in(described, rank, world_size)
    except CheckpointError as error:
        raise Unfit(str(error)) from error
    check_sizes(folder, described.files)  # all: one missing file makes the checkpoint useless
    needed = [place.state_file]
    if not storage.writes_own_files:
        optimizer_file = elastic.optimizer_file(described, place)
        needed += [place.model_file, optimizer_file]
    also_file = elastic.also_file(described, place) if parts.also else ""
    needed += [also_file] if also_file else []
    if missing := sorted(set(needed) - set(described.files)):
        raise CheckpointError(f"{folder.name}: the manifest names no {', '.join(missing)}")
    verify(folder, _share(described, needed, rank, world_size), is_quick=is_quick)
    # Weights are mapped, not read: the restore copies them anyway, and a rollback waits for it.
    can_map = not is_on_network(folder)
    files = {name: _read(folder, name, is_mapped=can_map and name != place.state_file) for name in needed}
    state = files[place.state_file]
    notes = elastic.adapt(state, described, rank, world_size)
    own = state.get(contents.OWN)
    if storage.writes_own_files:
        model, optimizer = own, None
        is_same_world = described.world_size == world_size
        restore = storage.load(folder, parts, state[contents.KEPT], is_same_world=is_same_world)
    else:
        model, optimizer, restore = files[place.model_file], files[optimizer_file], None
        if own is not None:
            model = {"state": {**model["state"], **own["state"]}, "buffers": own["buffers"]}
    part = next((item for item in described.ranks if item.rank == rank), None)
    return Loaded(
        manifest=described, model=model, optimizer=optimizer, state=state, world_size=world_size, part=part,
        restore_weights=restore, also=files[also_file] if also_file else {}, notes=notes,
    )  # fmt: skip


def _share(described: Manifest, needed: list[str], rank: int, world_size: int) -> dict[str, FileEntry]:
    """Files that this rank verifies: what it reads, and its share of those that any rank may read."""
    if not described.ranks:
        return described.files
    in_folders = sorted(name for name in described.files if "/" in name)
    mine = {*needed, *in_folders[rank::world_size]}
    return {name: entry for name, entry in described.files.items() if name in mine}


def _read(folder: Path, name: str, *, is_mapped: bool) -> Any:
    try:
        return torch.load(folder / name, map_location="cpu", weights_only=True, mmap=is_mapped)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise CheckpointError(f"{folder.name}/{name} cannot be loaded: {error}") from error


def check(parts: TrainingParts, loaded: Loaded, *, allow_without_data: bool) -> None:
    """Compare what was read with the live objects. Raises `Unfit`; changes nothing."""
    try:
        _check(parts, loaded)
        if not allow_without_data and not _has_data(parts, loaded):
            reason = parts.data_unavailable or loaded.manifest.absent.get("data", "it was saved without")
            raise CheckpointError(
                f"{loaded.manifest.checkpoint}: no data position ({reason}); set allow_without_data"
            )  # fmt: skip
    except CheckpointError as error:
        raise Unfit(str(error)) from error


def put_back(parts: TrainingParts, loaded: Loaded, *, skip_batches: int, refused: dict[str, str]) -> RestoreReport:
    """Overwrite the live state with a loaded one that has passed `check`.

    Raises `CheckpointError` before the first change, `PartlyRestored` after it.
    """
    saved = loaded.manifest
    targets = _targets(parts)
    data = parts.data if _has_data(parts, loaded) else None
    if data is not None:
        # First, because a loader may refuse. It is then set back to its position.
        before = data.state_dict()
        try:
            data.load_state_dict(loaded.state["data"], skip_batches=skip_batches)
        except Exception as error:
            try:
                data.load_state_dict(before)
            except Exception as second:
                raise PartlyRestored(f"data position is lost: {error}; then {second}") from error
            raise CheckpointError(f"the data position cannot be restored: {error}") from error
    try:
        _overwrite(parts, loaded, targets)
        reached = _compare(parts, loaded)
    except PartlyRestored:
        raise
    except Exception as error:
        raise PartlyRestored(f"{saved.checkpoint}: restoring stopped half-way: {error}") from error
    return RestoreReport(
        checkpoint=saved.checkpoint,
        step=saved.step,
        attempt=saved.attempt,
        samples=int(loaded.state["data"].get("samples", 0)) if data is not None else 0,
        data_restored=data is not None,
        parameter_checksum=reached,
        learning_rate=saved.learning_rate,
        restored=[
            "model",
            "optimizer",
            "rng",
            *(name for name, target in targets.items() if target is not None),
            *(["data"] if data is not None else []),
            *parts.also,
        ],
        refused=refused,
        notes=loaded.notes,
    )


def _targets(parts: TrainingParts) -> dict[str, Any]:
    return {"scheduler": parts.scheduler, "scaler": parts.active_scaler, "fp8": parts.controls}


def _has_data(parts: TrainingParts, loaded: Loaded) -> bool:
    return parts.data is not None and parts.data.unavailable is None and "data" in loaded.state


def _compare(parts: TrainingParts, loaded: Loaded) -> str:
    """Verify the restored state; returns the parameters' checksum. Raises `PartlyRestored`."""
    saved, part = loaded.manifest, loaded.part
    is_same_world = loaded.world_size == saved.world_size
    algorithm, wanted = saved.checksum_algorithm, saved.parameter_checksum
    if part is not None and saved.layout == "shards":
        algorithm, wanted = manifest.algorithm_of(saved, part), part.parameter_checksum
    reached = parameter_checksum(parts.model, algorithm)
    if reached != wanted and (is_same_world or saved.layout != "shards"):
        raise PartlyRestored(
            f"{saved.checkpoint}: parameters have checksum {reached} after the restore, {wanted} was saved"
        )
    if parts.controls is not None and (wrong := not_restored(loaded.state["fp8"], parts.controls.state_dict())):
        raise PartlyRestored(f"{saved.checkpoint}: {wrong}")
    now = rng.capture()
    is_comparable = is_same_world and ("cuda" in now) == ("cuda" in loaded.state["rng"])
    digest = contents.rng_digest(now)
    if is_comparable and digest != (part.rng_sha256 if part is not None else saved.rng_sha256):
        raise PartlyRestored(f"{saved.checkpoint}: the random state after the restore is not the one that was saved")
    # By the latest algorithm, as the parameters are summed again before the next update.
    return reached if algorithm == LATEST else parameter_checksum(parts.model)


def _check(parts: TrainingParts, loaded: Loaded) -> None:
    name, saved_state = loaded.manifest.checkpoint, loaded.state
    inner = core(parts.model)
    parameters = {key for key, _ in inner.named_parameters(remove_duplicate=False)}
    for kind, live in (("state", inner.state_dict()), ("buffers", contents.unsaved_buffers(inner))):
        saved = loaded.model[kind]
        if loaded.restore_weights is not None:
            live = {key: value for key, value in live.items() if key not in parameters}
        if different := sorted(set(saved) ^ set(live)):
            raise CheckpointError(f"{name}: the model differs in {', '.join(different[:5])}")
        for key, value in saved.items():
            here = live[key]
            if key.endswith("_extra_state") or not isinstance(here, torch.Tensor):
                continue  # an encoded blob whose length may change
            if is_shard(value):
                value = from_shard(value, here, f"{name}: {key}")
            if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (here.shape, here.dtype):
                raise CheckpointError(f"{name}: {key} is {_kind(value)}, here {_kind(here)}")
    if loaded.optimizer is not None:
        optimizer_state.check(parts.optimizer, loaded.optimizer)
    for part, target in _targets(parts).items():
        if target is not None and part not in saved_state:
            raise CheckpointError(f"{name}: saved without {part} ({loaded.manifest.absent.get(part, 'unknown')})")
    if parts.controls is not None and (wrong := form_differs(saved_state["fp8"], parts.controls.state_dict())):
        raise CheckpointError(f"{name}: {wrong}")
    if parts.scheduler is not None:
        differing = sorted(set(saved_state["scheduler"]) ^ set(parts.scheduler.state_dict()))
        if differing:
            raise CheckpointError(f"{name}: the scheduler is another one, it differs in {', '.join(differing[:5])}")
    try:
        also.check(parts.also, loaded.also)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from error
    if problem := rng.check(saved_state["rng"]):
        raise CheckpointError(f"{name}: {problem}")


def _kind(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _overwrite(parts: TrainingParts, loaded: Loaded, targets: dict[str, Any]) -> None:
    inner = core(parts.model)
    live = inner.state_dict()
    state = {
        key: from_shard(value, live[key], key) if is_shard(value) else value
        for key, value in loaded.model["state"].items()
    }
    if parts.controls is not None:
        state = te_extra.without_pickles(inner, state)
        te_extra.make_room(parts.model, loaded.state["fp8"])
    if loaded.restore_weights is not None:
        loaded.restore_weights()
    inner.load_state_dict(state, strict=loaded.restore_weights is None)
    with torch.no_grad():
        for name, buffer in contents.unsaved_buffers(inner).items():
            buffer.copy_(loaded.model["buffers"][name])
        # Gradients belong to the abandoned timeline.
        for parameter in parts.model.parameters():
            parameter.grad = None
    if loaded.optimizer is not None:
        optimizer_state.restore(parts.optimizer, loaded.optimizer)
    parts.optimizer.zero_grad(set_to_none=True)
    also.restore(parts.also, loaded.also)
    for part, target in targets.items():
        if target is not None:
            target.load_state_dict(loaded.state[part])
    rng.restore(loaded.state["rng"])
