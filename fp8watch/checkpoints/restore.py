"""Reading a checkpoint and putting it back in place: everything is checked before anything is overwritten."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fp8watch.checkpoints import contents, manifest, optimizer_state, rng
from fp8watch.checkpoints.checksum import parameter_checksum
from fp8watch.checkpoints.files import verify
from fp8watch.checkpoints.manifest import Manifest
from fp8watch.checkpoints.parts import TrainingParts
from fp8watch.errors import CheckpointError


class PartlyRestored(CheckpointError):
    """Restoring failed after overwriting had begun: live state is mixed and must not be trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checkpoint that was read and found intact, on the CPU."""

    manifest: Manifest
    files: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What a restore did."""

    checkpoint: str
    """The one that was restored: an older one than asked for when that was damaged."""
    step: int
    attempt: int
    """The attempt it was saved in."""
    samples: int
    """Samples consumed up to it; 0 without data position."""
    data_restored: bool
    parameter_checksum: str
    learning_rate: list[float]
    restored: list[str]
    refused: dict[str, str] = field(default_factory=dict)
    """Damaged checkpoints and what is wrong with each."""


def load_verified(folder: Path) -> Loaded:
    """Read a checkpoint whole. Raises `CheckpointError` when a file is missing, differs or is no plain data."""
    described = manifest.read(folder)
    needed = {contents.MODEL, contents.OPTIMIZER, contents.STATE}
    if missing := sorted(needed - set(described.files)):
        raise CheckpointError(f"{folder.name}: the manifest names no {', '.join(missing)}")
    verify(folder, described.files)
    files: dict[str, Any] = {}
    for name in sorted(needed):
        try:
            data = (folder / name).read_bytes()
            files[name] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
            raise CheckpointError(f"{folder.name}/{name} cannot be loaded: {error}") from error
    return Loaded(manifest=described, files=files)


def put_back(
    parts: TrainingParts,
    loaded: Loaded,
    *,
    skip_batches: int,
    allow_without_data: bool,
    refused: dict[str, str],
) -> RestoreReport:
    """Overwrite the live state with a loaded one.

    Raises `CheckpointError` before the first change when it does not fit, `PartlyRestored` after it.
    """
    state = loaded.files[contents.STATE]
    targets = {"scheduler": parts.scheduler, "scaler": parts.active_scaler, "fp8": parts.controls}
    _check(parts, loaded, targets)
    data = parts.data if parts.data is not None and parts.data.unavailable is None and "data" in state else None
    if data is None and not allow_without_data:
        reason = parts.data_unavailable or loaded.manifest.absent.get("data", "it was saved without")
        raise CheckpointError(f"{loaded.manifest.checkpoint}: no data position ({reason}); set allow_without_data")
    if data is not None:
        # First, because a loader may refuse; it is wound forward again then.
        before = data.state_dict()
        try:
            data.load_state_dict(state["data"], skip_batches=skip_batches)
        except Exception as error:
            try:
                data.load_state_dict(before)
            except Exception as second:
                raise PartlyRestored(f"data position is lost: {error}; then {second}") from error
            raise CheckpointError(f"the data position cannot be restored: {error}") from error
    try:
        _overwrite(parts, loaded, targets)
    except Exception as error:
        raise PartlyRestored(f"{loaded.manifest.checkpoint}: restoring stopped half-way: {error}") from error
    reached = parameter_checksum(parts.model)
    if reached != loaded.manifest.parameter_checksum:
        raise PartlyRestored(
            f"{loaded.manifest.checkpoint}: parameters have checksum {reached} after the restore, "
            f"{loaded.manifest.parameter_checksum} was saved"
        )
    return RestoreReport(
        checkpoint=loaded.manifest.checkpoint,
        step=loaded.manifest.step,
        attempt=loaded.manifest.attempt,
        samples=loaded.manifest.samples,
        data_restored=data is not None,
        parameter_checksum=reached,
        learning_rate=loaded.manifest.learning_rate,
        restored=[
            "model",
            "optimizer",
            "rng",
            *(name for name, target in targets.items() if target is not None),
            *(["data"] if data is not None else []),
        ],
        refused=refused,
    )


def _check(parts: TrainingParts, loaded: Loaded, targets: dict[str, Any]) -> None:
    name = loaded.manifest.checkpoint
    if loaded.manifest.world_size != 1:
        raise CheckpointError(f"{name}: saved by {loaded.manifest.world_size} ranks, here is 1")
    model, state = loaded.files[contents.MODEL], loaded.files[contents.STATE]
    for kind, live in (
        ("state", parts.model.state_dict()),
        ("buffers", contents.unsaved_buffers(parts.model)),
    ):
        saved = model[kind]
        if different := sorted(set(saved) ^ set(live)):
            raise CheckpointError(f"{name}: the model differs in {', '.join(different[:5])}")
        for key, value in saved.items():
            here = live[key]
            if key.endswith("_extra_state") or not isinstance(here, torch.Tensor):
                continue  # an encoded blob whose length may change
            if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (here.shape, here.dtype):
                raise CheckpointError(f"{name}: {key} is {_kind(value)}, here {_kind(here)}")
    optimizer_state.check(parts.optimizer, loaded.files[contents.OPTIMIZER])
    for part, target in targets.items():
        if target is not None and part not in state:
            raise CheckpointError(f"{name}: saved without {part} ({loaded.manifest.absent.get(part, 'unknown')})")
    if parts.scheduler is not None:
        differing = sorted(set(state["scheduler"]) ^ set(parts.scheduler.state_dict()))
        if differing:
            raise CheckpointError(f"{name}: the scheduler is another one, it differs in {', '.join(differing[:5])}")
    if problem := rng.check(state["rng"]):
        raise CheckpointError(f"{name}: {problem}")


def _kind(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _overwrite(parts: TrainingParts, loaded: Loaded, targets: dict[str, Any]) -> None:
    model, state = loaded.files[contents.MODEL], loaded.files[contents.STATE]
    parts.model.load_state_dict(model["state"], strict=True)
    with torch.no_grad():
        for name, buffer in contents.unsaved_buffers(parts.model).items():
            buffer.copy_(model["buffers"][name])
        # Gradients belong to the timeline that is given up.
        for parameter in parts.model.parameters():
            parameter.grad = None
    optimizer_state.restore(parts.optimizer, loaded.files[contents.OPTIMIZER])
    parts.optimizer.zero_grad(set_to_none=True)
    for part, target in targets.items():
        if target is not None:
            target.load_state_dict(state[part])
    rng.restore(state["rng"])
