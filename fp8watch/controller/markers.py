"""Small files under `FP8WATCH_DIR` by which people and processes stop each other: halted and disarmed.

`runs/<run>/halted.json` keeps attach from starting a halted run until a person releases it; `disarm` (for all runs) or
`runs/<run>/disarm` stops all acting (`fp8watch.training.disarm` is the ranks' side of it). They are files because they
must work when store, agent and network do not.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from fp8watch.atomic_file import replace_file
from fp8watch.training.disarm import disarm_files
from fp8watch.transport.places import run_folder


def write_halted(directory: Path, run: str, *, reason: str, step: int, time_unix: float) -> Path:
    """Mark a run as halted; the mark is on disk before this returns. Raises `OSError`."""
    path = run_folder(directory, run) / "halted.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"run": run, "reason": reason, "step": step, "time_unix": time_unix})
    replace_file(path, content.encode(), durable=True)  # written by every rank, and by the controller
    return path


def is_halted(directory: Path, run: str) -> bool:
    """Whether a run must not be started. A folder that cannot be read holds no marker: nothing acts there."""
    return os.path.exists(run_folder(directory, run) / "halted.json")


def why_halted(directory: Path, run: str) -> str:
    """The reason in a run's halted marker; empty: no marker, or one that cannot be read."""
    try:
        found = json.loads((run_folder(directory, run) / "halted.json").read_text())
    except (OSError, ValueError):
        return ""
    return str(found.get("reason") or "") if isinstance(found, dict) else ""


def release(directory: Path, run: str) -> bool:
    """Allow a halted run to be started again; False: it was not halted. Raises `OSError`."""
    path = run_folder(directory, run) / "halted.json"
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def disarm(directory: Path, run: str | None) -> Path:
    """Stop all acting, in one run or (None) in all runs."""
    path = disarm_files(directory, run)[-1]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def rearm(directory: Path, run: str | None) -> bool:
    """Undo `disarm`; False: there was nothing to undo."""
    try:
        disarm_files(directory, run)[-1].unlink()
    except FileNotFoundError:
        return False
    return True


def why_disarmed(directory: Path, run: str) -> str:
    """Which marker stops acting in a run; empty: none does."""
    for path in disarm_files(directory, run):
        if path.exists():
            return f"disarmed by {path}"
    return ""
