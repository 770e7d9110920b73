"""What goes into a checkpoint, file by file, taken from the live objects."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass, field
from typing import Any

import torch

from fp8watch.checkpoints import rng
from fp8watch.checkpoints.checksum import parameter_checksum
from fp8watch.checkpoints.manifest import FORMAT_VERSION, FileEntry, Manifest
from fp8watch.checkpoints.parts import TrainingParts
from fp8watch.checkpoints.plain import to_plain

MODEL, OPTIMIZER, STATE = "model.pt", "optimizer.pt", "state.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The state by file, and what of it is missing."""

    files: dict[str, Any]
    present: list[str]
    absent: dict[str, str] = field(default_factory=dict)
    samples: int = 0


def capture(parts: TrainingParts) -> Captured:
    """Everything a rollback needs. Tensors are shared with the live objects: write them before training goes on.

    Raises `CheckpointError` naming a value that is neither a tensor nor plain.
    """
    model = {
        "state": to_plain(parts.model.state_dict(), "model"),
        "buffers": to_plain(unsaved_buffers(parts.model), "buffers"),
    }
    state: dict[str, Any] = {"rng": to_plain(rng.capture(), "rng")}
    absent: dict[str, str] = {}
    scaler = parts.active_scaler
    for name, source, reason in (
        ("scheduler", parts.scheduler, "attach got no lr_scheduler"),
        ("scaler", scaler, "no scaler is in use"),
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
    return Captured(
        files={MODEL: model, OPTIMIZER: to_plain(parts.optimizer.state_dict(), "optimizer"), STATE: state},
        present=["model", "optimizer", *state],
        absent=absent,
        samples=samples,
    )


def describe(
    parts: TrainingParts,
    captured: Captured,
    files: dict[str, FileEntry],
    *,
    checkpoint: str,
    run: str,
    attempt: int,
    step: int,
    time_unix: float,
) -> Manifest:
    """The manifest of what was captured and written."""
    return Manifest(
        format_version=FORMAT_VERSION,
        checkpoint=checkpoint,
        run=run,
        attempt=attempt,
        step=step,
        samples=captured.samples,
        data_position_included="data" in captured.present,
        time_unix=time_unix,
        world_size=1,
        parts=captured.present,
        absent=captured.absent,
        learning_rate=[float(group["lr"]) for group in parts.optimizer.param_groups],
        parameter_checksum=parameter_checksum(parts.model),
        rng_sha256=rng_digest(captured.files[STATE]["rng"]),
        files=files,
        versions={"torch": str(torch.__version__), "python": platform.python_version()},
    )


def unsaved_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that `state_dict` leaves out (`persistent=False`), by qualified name."""
    saved = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name not in saved}


def rng_digest(state: dict[str, Any]) -> str:
    """SHA-256 over torch's CPU and device generators: ranks that should differ are seen to differ."""
    total = hashlib.sha256(state["host"]["torch"].numpy().tobytes())
    for device in state.get("cuda", ()):
        total.update(device.numpy().tobytes())
    return total.hexdigest()
