"""Captures the contents of a checkpoint, per file, from the live objects."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fp8watch.checkpoints import also as also_parts
from fp8watch.checkpoints import rng
from fp8watch.checkpoints.bit_sums import LATEST
from fp8watch.checkpoints.checksum import parameter_checksum, sum_nested
from fp8watch.checkpoints.manifest import FORMAT_VERSION, FileEntry, Manifest, RankPart
from fp8watch.checkpoints.parts import TrainingParts
from fp8watch.checkpoints.place import Place, core
from fp8watch.checkpoints.plain import to_plain

OWN = "own"
"""Key in the state file of a rank whose model is saved by another rank: the model state that differs between ranks."""

KEPT = "kept"
"""Key in the state file: what a storage with its own files needs to load model and optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One rank's state per file, and what is missing."""

    files: dict[str, Any]
    common: dict[str, Any] = field(default_factory=dict)
    """Files named by their contents, which another rank may also write."""
    optimizer_file: str = ""
    """Which of them holds this rank's optimizer."""
    also_file: str = ""
    """Which of `files` or `common` holds the `also=` objects."""
    present: list[str]
    absent: dict[str, str] = field(default_factory=dict)
    samples: int = 0
    rng_sha256: str = ""


def capture(parts: TrainingParts, place: Place, *, with_weights: bool = True) -> Captured:
    """Capture everything that a rollback needs. Tensors share the live objects' memory: write them before training
    continues.

    `with_weights` False: a storage saves model and optimizer itself. Raises `CheckpointError` naming a value that is
    neither a tensor nor plain.
    """
    state: dict[str, Any] = {"rng": to_plain(rng.capture(), "rng")}
    absent: dict[str, str] = {}
    for name, source, reason in (
        ("scheduler", parts.scheduler, "attach got no lr_scheduler"),
        ("scaler", parts.active_scaler, "no scaler is in use"),
        ("fp8", parts.controls, "no FP8 module"),
    ):
        if source is None:
            absent[name] = reason
        else:
            state[name] = to_plain(source.state_dict(), name)
    samples = 0
    if parts.data is None or parts.data_unavailable is not None:
        absent["data"] = parts.data_unavailable or "no data position"
    else:
        state["data"] = to_plain(parts.data.state_dict(), "data")
        samples = parts.data.samples
    present = ["model", "optimizer", *state]
    files: dict[str, Any] = {}
    common: dict[str, Any] = {}
    optimizer_file = ""
    if with_weights:
        optimizer = to_plain(parts.optimizer.state_dict(), "optimizer")
        if place.layout == "replicas":
            optimizer_file = place.optimizer_file(_sum_or_rank(optimizer, place.rank))
            common[optimizer_file] = optimizer
        else:
            files[place.optimizer_file()] = optimizer
        if place.saves_weights:
            files[place.model_file] = model_state(parts.model)
        else:
            state[OWN] = own_state(parts.model)
    files[place.state_file] = state
    also_file = ""
    if parts.also:
        also = also_parts.capture(parts.also)
        also_file = place.also_file(_sum_or_rank(also, place.rank) if place.layout == "replicas" else "")
        (common if place.layout == "replicas" else files)[also_file] = also
        present.append("also")
    return Captured(
        files=files, common=common, optimizer_file=optimizer_file, also_file=also_file, present=present,
        absent=absent, samples=samples, rng_sha256=rng_digest(state["rng"]),
    )  # fmt: skip


def _sum_or_rank(state: dict[str, Any], rank: int) -> str:
    """The name of a rank's state. The rank itself if its tensors cannot be summed."""
    try:
        return sum_nested(state)
    except (RuntimeError, TypeError, NotImplementedError):
        return f"{rank:05d}"


def model_state(model: torch.nn.Module) -> dict[str, Any]:
    """Contents of the model file: `state` (the state dict) and `buffers` (those not in the state dict)."""
    inner = core(model)
    return {"state": to_plain(inner.state_dict(), "model"), "buffers": to_plain(unsaved_buffers(inner), "buffers")}


def own_state(model: torch.nn.Module) -> dict[str, Any]:
    """The model file without parameters: buffers and extra state, which may differ between replicas."""
    whole = model_state(model)
    parameters = {name for name, _ in core(model).named_parameters(remove_duplicate=False)}
    return {**whole, "state": {name: value for name, value in whole["state"].items() if name not in parameters}}


def describe_part(
    parts: TrainingParts, captured: Captured, files: dict[str, FileEntry], *, rank: int, checksum: str | None = None,
    algorithm: str = LATEST, is_finite: bool = True,
) -> RankPart:  # fmt: skip
    """Describe what this rank has saved. `checksum`: of the parameters by `algorithm`, if already computed.
    `is_finite`: whether they are all finite."""
    return RankPart(
        rank=rank,
        samples=captured.samples,
        parts=captured.present,
        absent=captured.absent,
        learning_rate=[float(group["lr"]) for group in parts.optimizer.param_groups],
        parameter_checksum=checksum or parameter_checksum(parts.model, algorithm),
        checksum_algorithm=algorithm,
        is_finite=is_finite,
        rng_sha256=captured.rng_sha256,
        optimizer_file=captured.optimizer_file,
        also_file=captured.also_file,
        files=files,
    )


def describe(
    saved: Sequence[RankPart],
    place: Place,
    *,
    checkpoint: str,
    run: str,
    attempt: int,
    step: int,
    time_unix: float,
    storage: str = "torch",
    shared: dict[str, FileEntry] | None = None,
) -> Manifest:
    """The manifest of what all ranks have written. `shared`: files that belong to no single rank."""
    first = saved[0]
    common = [name for name in first.parts if all(name in part.parts for part in saved)]
    absent = {name: reason for part in reversed(saved) for name, reason in part.absent.items()}
    has_data = "data" in common
    return Manifest(
        format_version=FORMAT_VERSION,
        checkpoint=checkpoint,
        run=run,
        attempt=attempt,
        step=step,
        samples=sum(part.samples for part in saved) if has_data else 0,
        data_position_included=has_data,
        time_unix=time_unix,
        world_size=len(saved),
        parts=common,
        absent=absent,
        learning_rate=first.learning_rate,
        parameter_checksum=first.parameter_checksum,
        checksum_algorithm=first.checksum_algorithm,
        rng_sha256=first.rng_sha256,
        files={**(shared or {}), **{name: entry for part in saved for name, entry in part.files.items()}},
        versions={"torch": str(torch.__version__), "python": platform.python_version()},
        layout=place.layout,
        not_finite=[part.rank for part in saved if not part.is_finite],
        storage=storage,
        ranks=[] if place.layout == "whole" else list(saved),
    )


def unsaved_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that are not in the state dict (`persistent=False`), by qualified name."""
    saved = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name not in saved}


def rng_digest(state: dict[str, Any]) -> str:
    """SHA-256 over torch's CPU and device generators. It differs between ranks whose random states differ."""
    total = hashlib.sha256(state["host"]["torch"].numpy().tobytes())
    for device in state.get("cuda", ()):
        total.update(device.numpy().tobytes())
    return total.hexdigest()
