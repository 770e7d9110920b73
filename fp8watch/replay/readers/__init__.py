"""One reader per format; `open_path` looks at the contents of a path and chooses.

Supported: CSV (plain, Lightning's metrics.csv, W&B's exports), JSON rows (W&B's history as lines or a list),
Transformers' trainer_state.json, text logs of Megatron, torchtitan and NeMo, TensorBoard events (with the `tensorboard`
package), fp8watch's own stores, frame files (`.fp8rec`) and incident bundles, a cluster's Redis. Not supported: W&B's
binary run files.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from fp8watch.errors import BadInput
from fp8watch.replay import bundle, frames_file
from fp8watch.replay.lines import beginning
from fp8watch.replay.readers import (
    by_name,
    cluster,
    csv_log,
    folder,
    json_rows,
    store,
    tensorboard,
    text_log,
    trainer_state,
)
from fp8watch.replay.recording import Recording

SNIFF_BYTES = 4 * 1024 * 1024
"""Bytes of a text log that are searched for a step line (start-up messages come first)."""

PACKED = {
    b"\x1f\x8b": "packed with gzip: unpack it first (gunzip)", b"BZh": "packed with bzip2: unpack it first (bunzip2)",
    b"\xfd7zXZ\x00": "packed with xz: unpack it first (unxz)", b"\x28\xb5\x2f\xfd": "packed with zstd: unpack it first",
    b"PK\x03\x04": "a ZIP archive (a spreadsheet?): unpack it, or export it as CSV first",
    b"PAR1": "a Parquet file: write it as CSV first", b"\x89HDF": "an HDF5 file: write it as CSV first",
}  # fmt: skip
"""First bytes of files that are not text -> message."""


def open_path(source: Path | str) -> list[Recording]:
    """The runs at a path, or in a Redis by its URL; where there is no such path, the run of that name.

    Raises `BadInput` if no reader knows the format, `MissingDependency` if a package is needed.
    """
    is_url = isinstance(source, str) and cluster.is_url(source)
    place = cluster.without_secrets(str(source)) if is_url else str(source)
    # Recordings from a folder already have the paths of their own files.
    return [item if item.place else dataclasses.replace(item, place=place) for item in _open(source)]


def _open(source: Path | str) -> list[Recording]:
    if isinstance(source, str) and cluster.is_url(source):
        return cluster.read(source)
    if source == "":  # an unset shell variable, which `Path` would take for the current folder
        raise BadInput(["command line:1: path: empty; the current folder is '.'"])
    path = Path(source)
    if not path.exists():
        return _by_name(str(source))
    if path.is_dir():
        if any("tfevents" in item.name for item in path.iterdir()) and not (path / "trainer_state.json").is_file():
            return [tensorboard.read(path)]
        return [recording for item in folder.logs(path) for recording in open_path(item)]
    if not path.is_file():
        raise BadInput([f"{path}:1: path: neither a file nor a folder"])
    if "tfevents" in path.name:
        return [tensorboard.read(path)]
    if frames_file.is_recording(path):
        return frames_file.read(path)
    if bundle.is_bundle(path):
        return bundle.read(path)
    if store.is_store(path):
        return store.read(path)
    return _open_log(path)


def _by_name(name: str) -> list[Recording]:
    """A run under FP8WATCH_DIR: what has a separator is meant as a path."""
    missing = f"{name}:1: path: no such file or folder"
    if os.sep in name:
        raise BadInput([missing])
    if recordings := by_name.read(name):
        return recordings
    raise BadInput([f"{missing}, and no run of that name {by_name.looked()}"])


def _open_log(path: Path) -> list[Recording]:
    head = beginning(path, SNIFF_BYTES)
    packed = next((name for magic, name in PACKED.items() if head.raw.startswith(magic)), None)
    if packed is not None:
        raise BadInput([f"{path}:1: format: {packed}"])
    if path.suffix in {".csv", ".tsv"}:
        return csv_log.read_all(path)
    if path.suffix == ".json":
        is_rows = path.name != "trainer_state.json" and head.text.lstrip(" \t\r\n").startswith("[")
        return [json_rows.read_list(path) if is_rows else trainer_state.read(path)]
    if path.suffix in {".jsonl", ".ndjson"} or json_rows.looks_like_rows(head.text):
        return [json_rows.read_lines(path)]
    kind = text_log.recognise(head.text)
    if kind is not None:
        return [text_log.read(path, kind)]
    if csv_log.looks_like_rows(head.text):
        return csv_log.read_all(path)
    known = "CSV, JSON rows, trainer_state.json, Megatron, torchtitan or NeMo log, event file, store or bundle"
    raise BadInput([f"{path}:1: format: no {known}"])
