"""Stops all actions at once: `FP8WATCH_DISARM=1`, or a file named `disarm` in FP8WATCH_DIR or in the run's folder.

`fp8watch disarm` creates the file. It is checked while the run goes on, so no restart is needed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from fp8watch.settings import Settings
from fp8watch.transport import places

FILE_NAME = "disarm"
LOOK_EVERY_SECONDS = 1.0
"""Interval of file checks, which take microseconds on a local disk and longer on a shared one. Before a command is
carried out, the files are checked in any case."""

_FALSE = frozenset({"", "0", "false", "no", "off"})


def disarm_files(directory: Path, run: str | None) -> list[Path]:
    """Paths of the disarm files: for all runs under `directory`, and for `run`."""
    files = [directory / FILE_NAME]
    if run is not None:
        files.append(places.run_folder(directory, run) / FILE_NAME)
    return files


class Disarm:
    """Whether actions are disarmed."""

    def __init__(self, settings: Settings, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._always = settings.disarm
        self._files = disarm_files(settings.dir, run)
        self._clock = clock
        self._looked_at: float | None = None
        self._reason: str | None = None

    def reason(self, *, now: bool = False) -> str | None:
        """Why nothing may act; None: actions are allowed. `now`: check the files even if they were checked recently."""
        time_now = self._clock()
        if now or self._looked_at is None or time_now - self._looked_at >= LOOK_EVERY_SECONDS:
            self._looked_at = time_now
            self._reason = self._look()
        return self._reason

    def _look(self) -> str | None:
        if os.environ.get("FP8WATCH_DISARM", "").strip().lower() not in _FALSE:
            return "disarmed by FP8WATCH_DISARM"
        if self._always:
            return "disarmed by the settings"
        for file in self._files:
            if os.path.exists(file):
                return f"disarmed by {file}"
        return None
