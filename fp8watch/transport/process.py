"""The embedded background process: started from the transport thread, watched, and restarted `restart_limit` times.

It is started by `subprocess` in a new session, never by multiprocessing: a fork after CUDA initialisation breaks the
child, and a forked child would inherit the rendezvous socket. The process exits by itself when the trainer's sockets
close (`fp8watch_agent.lifecycle`).
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from fp8watch.settings import Settings
from fp8watch.transport import places

logger = logging.getLogger(__name__)

_children: list[subprocess.Popen[bytes]] = []
"""Children not reaped yet. `Popen` warns if it is garbage-collected while its process runs."""


class AgentProcess:
    """Starts `python -m fp8watch_agent --embedded` and tells how it ended. Used by one thread."""

    def __init__(self, *, run: str, socket: Path, settings: Settings) -> None:
        self._run = run
        self._socket = socket
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self.num_starts = 0

    @property
    def pid(self) -> int | None:
        """Process id, also after it has ended; None before the first start."""
        return None if self._process is None else self._process.pid

    @property
    def log(self) -> Path:
        """File for the process's stdout and stderr."""
        return places.run_folder(self._settings.dir.absolute(), self._run) / "agent.log"

    def is_running(self) -> bool:
        """Whether the last process is alive."""
        return self._process is not None and self._process.poll() is None

    def has_restarts_left(self) -> bool:
        """Whether `start` may be called once more."""
        return self.num_starts <= self._settings.restart_limit

    def start(self) -> None:
        """Start the process. Raises `OSError`."""
        self.num_starts += 1
        _reap()
        with self._open_log() as log:
            self._process = subprocess.Popen(
                [*self._command()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                close_fds=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        _children.append(self._process)
        logger.debug("started background process %s", self._process.pid)

    def ending(self) -> str:
        """How the process ended, as text for a message."""
        code = None if self._process is None else self._process.returncode
        if code is None:
            return "is running"
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def terminate(self) -> None:
        """Send SIGTERM, because nobody will connect to the process any more."""
        if self._process is not None and self.is_running():
            self._process.terminate()

    def reap(self, timeout_seconds: float) -> None:
        """Wait for the process to end, so that no zombie remains if the trainer lives on after detaching."""
        deadline = time.monotonic() + timeout_seconds
        while self.is_running() and time.monotonic() < deadline:
            time.sleep(0.1)
        _reap()

    def _command(self) -> list[str]:
        settings = self._settings
        return [
            sys.executable, "-m", "fp8watch_agent", "--embedded",
            "--run", self._run,
            "--socket", str(self._socket),
            "--dir", str(settings.dir.absolute()),
            "--metrics-port", str(settings.metrics_port),
            "--parent-pid", str(os.getpid()),
            "--end-grace-seconds", str(settings.end_grace_seconds),
            "--connect-seconds", str(settings.connect_seconds),
            "--log-level", settings.log_level,
        ]  # fmt: skip

    def _open_log(self) -> IO[bytes]:
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            return self.log.open("ab")
        except OSError:
            # The process itself reports that FP8WATCH_DIR is not writable, and keeps its store elsewhere.
            return open(os.devnull, "ab")


def _reap() -> None:
    for child in list(_children):
        if child.poll() is not None:
            _children.remove(child)
