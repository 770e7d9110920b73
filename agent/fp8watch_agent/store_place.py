"""Opens a run's store: in the run's folder, else in the state folder, else in memory.

A folder that is not writable, is full or is on a network file system never stops a run. It causes one warning or log
line.
"""

from __future__ import annotations

import logging
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from fp8watch.controller.stores.base import Store
from fp8watch.controller.stores.memory import MemoryStore
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.errors import Fp8watchError
from fp8watch.transport import places
from fp8watch_agent import filesystem
from fp8watch_agent.options import AgentOptions

logger = logging.getLogger(__name__)
STORE_NAME = "store.sqlite"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedStore:
    """An open store, its path ('' in memory), the folder for endpoint files, and warnings for the user."""

    store: Store
    path: str
    endpoint_directory: Path
    warnings: list[str]


def open_store(options: AgentOptions, run: str) -> OpenedStore:
    """Open a run's store, whatever the state of FP8WATCH_DIR. Does not raise for a folder that cannot be used."""
    home = options.directory
    problem = filesystem.why_unwritable(places.run_folder(home, run))
    warnings = [] if problem is None else [f"{places.UNWRITABLE} ({problem})"]
    folders = places.state_folders(home)
    if problem is None:
        if filesystem.is_network(home):
            logger.info("%s is on a network file system: the store lies elsewhere, endpoint.json says where", home)
            folders.append(home)
        else:
            folders.insert(0, home)
    for folder in folders:
        if problem is not None and filesystem.why_unwritable(places.run_folder(folder, run)) is not None:
            continue
        path = places.run_folder(folder, run) / STORE_NAME
        try:
            store = SqliteStore(path, full_steps=options.store_full_steps, limit_bytes=options.store_limit_bytes)
        except (OSError, sqlite3.Error, Fp8watchError) as error:
            warnings.append(f"no store at {path} ({error})")
            continue
        if warnings:
            warnings = [f"{'; '.join(warnings)}; the store lies at {path}"]
        return OpenedStore(
            store=store, path=str(path), endpoint_directory=home if problem is None else folder, warnings=warnings
        )
    warnings = [f"{'; '.join(warnings) or 'no folder for a store'}; nothing of this run will be kept"]
    return OpenedStore(store=MemoryStore(keep_frames=False), path="", endpoint_directory=home, warnings=warnings)
