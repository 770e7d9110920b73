"""One reader a format; `open_path` looks at what a path holds and chooses.

Read today: CSV (plain, Lightning's metrics.csv, W&B's exports), JSON rows (W&B's history as lines or a list),
Transformers' trainer_state.json, text logs of Megatron, torchtitan and NeMo, TensorBoard events (with the `tensorboard`
package), fp8watch's own stores, frame files (`.fp8rec`) and incident bundles. Not read: W&B's binary run files.
"""

from __future__ import annotations

from pathlib import Path

from fp8watch.errors import BadInput
from fp8watch.replay import bundle, frames_file
from fp8watch.replay.readers import csv_log, json_rows, store, tensorboard, text_log, trainer_state
from fp8watch.replay.recording import Recording

SNIFF_BYTES = 4 * 1024 * 1024
"""How far into a text log a step line is looked for (start-up chatter comes first)."""


def open_path(path: Path) -> list[Recording]:
    """The runs at a path. Raises `BadInput` for what no reader knows, `MissingDependency` for what needs a package."""
    if not path.exists():
        raise BadInput([f"{path}:1: path: no such file or folder"])
    if path.is_dir():
        return _open_folder(path)
    if "tfevents" in path.name:
        return [tensorboard.read(path)]
    if frames_file.is_recording(path):
        return frames_file.read(path)
    if bundle.is_bundle(path):
        return bundle.read(path)
    if store.is_store(path):
        return store.read(path)
    if path.suffix == ".csv":
        return csv_log.read_all(path)
    if path.suffix == ".json":
        is_rows = path.name != "trainer_state.json" and json_rows.is_list(path)
        return [json_rows.read_list(path) if is_rows else trainer_state.read(path)]
    if path.suffix in {".jsonl", ".ndjson"}:
        return [json_rows.read_lines(path)]
    with path.open("rb") as handle:
        head = handle.read(SNIFF_BYTES).decode("utf-8", errors="replace")
    if json_rows.looks_like_rows(head):
        return [json_rows.read_lines(path)]
    kind = text_log.recognise(head)
    if kind is None:
        known = "CSV, JSON rows, trainer_state.json, Megatron, torchtitan or NeMo log, event file, store or bundle"
        raise BadInput([f"{path}:1: format: no {known}"])
    return [text_log.read(path, kind)]


def _open_folder(path: Path) -> list[Recording]:
    if (path / "trainer_state.json").is_file():
        return [trainer_state.read(path / "trainer_state.json")]
    if any(path.glob("*tfevents*")):
        return [tensorboard.read(path)]
    for name in ("metrics.csv", "wandb-history.jsonl", "files/wandb-history.jsonl"):
        if (path / name).is_file():
            return open_path(path / name)
    stores = sorted(
        item for item in path.rglob("*") if item.is_file() and item.suffix in {".db", ".sqlite", ".sqlite3"}
    )
    if not stores:
        known = "trainer_state.json, metrics.csv, W&B history, event file or store"
        raise BadInput([f"{path}:1: folder: no {known} in it"])
    return [recording for item in stores for recording in store.read(item)]
