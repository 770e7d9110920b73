"""Removes surplus checkpoints and the remains of interrupted saves."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fp8watch.checkpoints.ledger import Ledger
from fp8watch.errors import CheckpointError
from fp8watch.records import CheckpointRecord

logger = logging.getLogger(__name__)

REMOVAL_POLLS = 8
"""Step boundaries at which a discarded folder is removed again."""
UNFINISHED = ".unfinished-"
"""Prefix of a folder being written: `<prefix><checkpoint>.<pid>`, or with several ranks
`<prefix><checkpoint>.ranks`."""


class DiscardedFolders:
    """Folders of discarded saves. They are removed repeatedly, because other ranks may still be writing into them."""

    def __init__(self) -> None:
        self._polls: dict[Path, int] = {}

    def __contains__(self, folder: Path) -> bool:
        return folder in self._polls

    def add(self, folder: Path) -> None:
        """Add a folder."""
        self._polls[folder] = REMOVAL_POLLS

    def poll(self) -> None:
        """Remove the folders again. Called at each step boundary."""
        for folder in list(self._polls):
            shutil.rmtree(folder, ignore_errors=True)
            self._polls[folder] -= 1
            if self._polls[folder] <= 0:
                del self._polls[folder]


def free_name(root: Path, step: int, attempt: int) -> str:
    """A name for the checkpoint of a step that is not in use."""
    name = f"step-{step:08d}-attempt-{attempt}"
    suffix = 1
    while (root / name).exists():
        suffix += 1
        name = f"step-{step:08d}-attempt-{attempt}-{suffix}"
    return name


def surplus(records: Sequence[CheckpointRecord], keep: int) -> list[CheckpointRecord]:
    """What rotation removes: tainted checkpoints first, then the oldest. `records` are in the order of saving.

    Never the newest good one, which a rollback needs when everything newer is in doubt. Pending ones do not count and
    are no reason to remove an older one.
    """
    records = [record for record in records if record.label != "pending"]
    excess = len(records) - keep
    if excess <= 0:
        return []
    pinned = next((record.checkpoint for record in reversed(records) if record.label == "good"), None)
    older = records[:-1]  # the one just saved always stays
    order = [record for record in older if record.label == "tainted"]
    order += [record for record in older if record.label != "tainted" and record.checkpoint != pinned]
    return order[:excess]


def rotate(ledger: Ledger, keep: int) -> list[CheckpointRecord]:
    """Remove surplus folders and their ledger entries. Returns the removed records with an empty path.

    A folder that cannot be removed is kept and logged.
    """
    gone = []
    for record in surplus(ledger.checkpoints, keep):
        try:
            folder = Path(record.path)
            # Renamed first: a half-removed checkpoint must not look like a complete one.
            doomed = folder.with_name(f"{UNFINISHED}{folder.name}.{os.getpid()}")
            os.rename(folder, doomed)
            ledger.drop(record.checkpoint)
            gone.append(msgspec.structs.replace(record, path=""))
            shutil.rmtree(doomed)
        except (OSError, CheckpointError) as error:
            logger.warning("fp8watch: old checkpoint %s could not be removed: %s", record.checkpoint, error)
    return gone


def clear_unfinished(root: Path) -> None:
    """Remove folders that earlier processes left half-written or half-removed."""
    for folder in root.glob(f"{UNFINISHED}*"):
        process = folder.name.rpartition(".")[2]
        if process.isdigit() and int(process) != os.getpid() and Path(f"/proc/{process}").exists():
            continue
        shutil.rmtree(folder, ignore_errors=True)
        logger.info("removed unfinished %s", folder.name)
