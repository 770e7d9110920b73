"""`manifest.json`, the description of a checkpoint, written last.

A folder without a manifest is not a checkpoint. Sizes and SHA-256 sums are checked before anything is overwritten.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

import msgspec

from fp8watch.checkpoints.bit_sums import ALGORITHMS, WEIGHTED
from fp8watch.errors import CheckpointError

FORMAT_VERSION = 4
READABLE = (3, 4)
"""Version 3 does not name its checksums' algorithm."""
NAME = "manifest.json"


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a checkpoint."""

    bytes: int
    sha256: str
    """SHA-256 of the contents; of a large file, over the binary SHA-256 sums of its pieces."""
    piece_bytes: int = 0
    """Size of the pieces; 0: hashed as a whole."""
    quick_sum: str = ""
    """See `fp8watch.checkpoints.quick_sum`; empty: unknown."""


class RankPart(msgspec.Struct, frozen=True, kw_only=True):
    """What one of several ranks has saved: `part-<rank>.json` until the manifest is written."""

    rank: int
    failed: str = ""
    """Why it could not save. The checkpoint is then discarded."""
    samples: int = 0
    parts: list[str] = []
    absent: dict[str, str] = {}
    learning_rate: list[float] = []
    parameter_checksum: str = ""
    """Checksum of the parameters that this rank holds."""
    checksum_algorithm: str = ""
    """Its algorithm; empty: that of the manifest."""
    is_finite: bool = True
    """Whether these are all finite."""
    rng_sha256: str = ""
    """Digest of its random state."""
    optimizer_file: str = ""
    """Layout replicas: the file with this rank's optimizer state, named by its contents. Equal states share one."""
    also_file: str = ""
    """The file with this rank's `also=` objects; empty: none."""
    files: dict[str, FileEntry] = {}


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `manifest.json`."""

    format_version: int
    checkpoint: str
    run: str
    attempt: int
    step: int
    """Number of optimizer updates done."""
    samples: int
    """Samples consumed by all ranks together; 0 without data position."""
    data_position_included: bool
    time_unix: float
    world_size: int
    parts: list[str]
    """Parts saved by all ranks: model, optimizer, scheduler, scaler, rng, fp8, data, also."""
    absent: dict[str, str]
    """Parts not saved, and why."""
    learning_rate: list[float]
    """LR of each parameter group for the next update."""
    parameter_checksum: str
    """See `fp8watch.checkpoints.checksum`."""
    checksum_algorithm: str = WEIGHTED
    """Algorithm of the parameter checksums: a name in `fp8watch.checkpoints.bit_sums`."""
    rng_sha256: str
    """Digest of the random state of rank 0."""
    files: dict[str, FileEntry]
    versions: dict[str, str]
    layout: Literal["whole", "replicas", "shards"] = "whole"
    """See `fp8watch.checkpoints.place`."""
    storage: str = "torch"
    """What wrote model and optimizer: torch, dcp or callback."""
    ranks: list[RankPart] = []
    """The parts of several ranks, in order of rank; empty for one rank."""
    not_finite: list[int] = []
    """Ranks with a parameter that is not finite. The checkpoint is saved, but is not a target."""
    manifest_sha256: str = ""
    """SHA-256 of the manifest's JSON with this field empty. Detects flipped bits."""


def share_of(manifest: Manifest, rank: int) -> dict[str, FileEntry]:
    """Files that this rank checks when all ranks share the work: its own, and its share of those that no rank owns."""
    if not manifest.ranks:
        return manifest.files
    written = {name: part.rank for part in manifest.ranks for name in part.files}
    of_nobody = sorted(manifest.files.keys() - written.keys())[rank :: len(manifest.ranks)]
    return {name: entry for name, entry in manifest.files.items() if written.get(name) == rank or name in of_nobody}


def spoilt(manifest: Manifest) -> str | None:
    """Why it must not be restored: parameters are not finite, or differ between replicas."""
    if manifest.not_finite:
        return f"parameters of rank {manifest.not_finite[0]} are not finite"
    if manifest.layout != "replicas":
        return None
    firsts: dict[str, RankPart] = {}
    for part in manifest.ranks:  # checksums by different algorithms, of ranks of different versions, say nothing
        first = firsts.setdefault(algorithm_of(manifest, part), part)
        if part.parameter_checksum != first.parameter_checksum:
            return f"parameters of rank {part.rank} are not those of rank {first.rank}"
    return None


def algorithm_of(manifest: Manifest, part: RankPart) -> str:
    """The algorithm of a part's parameter checksum."""
    return part.checksum_algorithm or manifest.checksum_algorithm


def write(manifest: Manifest) -> bytes:
    """The manifest as indented JSON, with its own checksum."""
    manifest = msgspec.structs.replace(manifest, manifest_sha256=_sum(msgspec.to_builtins(manifest)))
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def _sum(fields: dict[str, Any]) -> str:
    """SHA-256 of all fields present, also those of other versions."""
    return hashlib.sha256(msgspec.json.encode({**fields, "manifest_sha256": ""})).hexdigest()


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder. Raises `CheckpointError` if it is missing, damaged or of another format
    version."""
    try:
        data = (folder / NAME).read_bytes()
        manifest = msgspec.json.decode(data, type=Manifest)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder.name}: no {NAME}, so it was never completed") from error
    except (OSError, msgspec.DecodeError, ValueError) as error:
        raise CheckpointError(f"{folder.name}: {NAME} cannot be read: {error}") from error
    if manifest.format_version not in READABLE:
        known = " and ".join(map(str, READABLE))
        raise CheckpointError(f"{folder.name}: format version {manifest.format_version}, this fp8watch reads {known}")
    if manifest.manifest_sha256 != _sum(msgspec.json.decode(data)):
        raise CheckpointError(f"{folder.name}: {NAME} does not match its own SHA-256")
    used = {manifest.checksum_algorithm, *(algorithm_of(manifest, part) for part in manifest.ranks)}
    if unknown := sorted(used - ALGORITHMS.keys()):
        raise CheckpointError(f"{folder.name}: its checksums are by {unknown[0]!r}, which this fp8watch does not know")
    return manifest
