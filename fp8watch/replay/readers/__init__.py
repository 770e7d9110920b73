"""One reader a format; `open_path` looks at what a path holds and chooses.

Read today: CSV, Transformers' trainer_state.json, Megatron and torchtitan text logs, TensorBoard events (with
the `tensorboard` package), fp8watch's own stores. Not read yet: Weights & Biases' binary and JSON-lines exports
(their CSV exports are), Lightning's and NeMo's own formats.
"""

from __future__ import annotations

from pathlib import Path

from fp8watch.errors import BadInput
from fp8watch.replay.readers import csv_log, store, tensorboard, text_log, trainer_state
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
    if store.is_store(path):
        return store.read(path)
    if path.suffix == ".csv":
        return [csv_log.read(path)]
    if path.suffix == ".json":
        return [trainer_state.read(path)]
    with path.open("rb") as handle:
        head = handle.read(SNIFF_BYTES)
    kind = text_log.recognise(head.decode("utf-8", errors="replace"))
    if kind is None:
        raise BadInput([f"{path}:1: format: no CSV, trainer_state.json, Megatron or torchtitan log, or store"])
    return [text_log.read(path, kind)]


def _open_folder(path: Path) -> list[Recording]:
    if (path / "trainer_state.json").is_file():
        return [trainer_state.read(path / "trainer_state.json")]
    if any(path.glob("*tfevents*")):
        return [tensorboard.read(path)]
    stores = sorted(
        item for item in path.rglob("*") if item.is_file() and item.suffix in {".db", ".sqlite", ".sqlite3"}
    )
    if not stores:
        raise BadInput([f"{path}:1: folder: no trainer_state.json, event file or store in it"])
    return [recording for item in stores for recording in store.read(item)]
