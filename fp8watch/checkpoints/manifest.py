"""What a checkpoint says about itself: `manifest.json`, written last.

A folder without a manifest is no checkpoint. Sizes and SHA-256 sums are checked before anything is overwritten.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

import msgspec

from fp8watch.errors import CheckpointError

FORMAT_VERSION = 3
NAME = "manifest.json"


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a checkpoint."""

    bytes: int
    sha256: str
    """Of its contents; of a large one, over the binary SHA-256 sums of its pieces."""
    piece_bytes: int = 0
    """Size of the pieces; 0: hashed as a whole."""
    quick_sum: str = ""
    """See `fp8watch.checkpoints.quick_sum`; empty: only SHA-256 is known."""


class RankPart(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank of several has saved: `part-<rank>.json` until the manifest is written."""

    rank: int
    failed: str = ""
    """Why it could not save; the checkpoint is given up then."""
    samples: int = 0
    parts: list[str] = []
    absent: dict[str, str] = {}
    learning_rate: list[float] = []
    parameter_checksum: str = ""
    """Of the parameters as this rank holds them."""
    is_finite: bool = True
    """Whether they are all numbers."""
    rng_sha256: str = ""
    """Digest of its own random state."""
    optimizer_file: str = ""
    """Among copies: the file that holds this rank's optimizer state, called by its contents; equal states share one."""
    also_file: str = ""
    """The file that holds what else this rank was given to save; empty: nothing."""
    files: dict[str, FileEntry] = {}


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `manifest.json`."""

    format_version: int
    checkpoint: str
    run: str
    attempt: int
    step: int
    """Optimizer updates done."""
    samples: int
    """Samples consumed, by all ranks together; 0 when the data position is not included."""
    data_position_included: bool
    time_unix: float
    world_size: int
    parts: list[str]
    """What is inside: model, optimizer, scheduler, scaler, rng, fp8, data. Of several ranks, what all of them have."""
    absent: dict[str, str]
    """What is not inside, and why."""
    learning_rate: list[float]
    """LR of each parameter group for the update that comes next."""
    parameter_checksum: str
    """See `fp8watch.checkpoints.checksum`."""
    rng_sha256: str
    """Digest of the random state (of rank 0)."""
    files: dict[str, FileEntry]
    versions: dict[str, str]
    layout: Literal["whole", "replicas", "shards"] = "whole"
    """See `fp8watch.checkpoints.place`."""
    storage: str = "torch"
    """What wrote model and optimizer: torch, dcp or callback."""
    ranks: list[RankPart] = []
    """Of each of several ranks, in their order."""
    not_finite: list[int] = []
    """Ranks that held a parameter that is not finite: saved all the same, and no target."""
    manifest_sha256: str = ""
    """Sum of the manifest's JSON with this field empty: a flipped bit in a number is noticed, too."""


def share_of(manifest: Manifest, rank: int) -> dict[str, FileEntry]:
    """Files that this rank looks at when all ranks look at all of them: its own, and its share of those of nobody."""
    if not manifest.ranks:
        return manifest.files
    written = {name: part.rank for part in manifest.ranks for name in part.files}
    of_nobody = sorted(manifest.files.keys() - written.keys())[rank :: len(manifest.ranks)]
    return {name: entry for name, entry in manifest.files.items() if written.get(name) == rank or name in of_nobody}


def spoilt(manifest: Manifest) -> str | None:
    """Why nobody may go back to it: parameters that are no numbers, or copies of a model that are none."""
    if manifest.not_finite:
        return f"parameters of rank {manifest.not_finite[0]} are not finite"
    checksums = [part.parameter_checksum for part in manifest.ranks]
    if manifest.layout != "replicas":
        return None
    other = next((rank for rank, checksum in enumerate(checksums) if checksum != checksums[0]), None)
    return None if other is None else f"parameters of rank {other} are not those of rank 0"


def write(manifest: Manifest) -> bytes:
    """The manifest as indented JSON, with its own sum."""
    manifest = msgspec.structs.replace(manifest, manifest_sha256=_sum(msgspec.to_builtins(manifest)))
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def _sum(fields: dict[str, Any]) -> str:
    """Of what is written, whichever fields that version knew."""
    return hashlib.sha256(msgspec.json.encode({**fields, "manifest_sha256": ""})).hexdigest()


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder. Raises `CheckpointError` when it is absent, damaged or of another format."""
    try:
        data = (folder / NAME).read_bytes()
        manifest = msgspec.json.decode(data, type=Manifest)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder.name}: no {NAME}, so it was never completed") from error
    except (OSError, msgspec.DecodeError, ValueError) as error:
        raise CheckpointError(f"{folder.name}: {NAME} cannot be read: {error}") from error
    if manifest.format_version != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder.name}: format version {manifest.format_version}, this fp8watch reads {FORMAT_VERSION}"
        )
    if manifest.manifest_sha256 != _sum(msgspec.json.decode(data)):
        raise CheckpointError(f"{folder.name}: {NAME} does not match its own SHA-256")
    return manifest
