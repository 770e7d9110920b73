"""Trainings as separate processes, and the losses they send.

Each uses one arithmetic thread: three of them share two cores, and one thread always adds in the same order.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from fp8watch.demo.config import RunSpec

FINAL_STEPS = 20
"""A loss shown as a number is the mean over this many optimizer steps; a final loss, over the last of them."""

STOP_SECONDS = 10.0
"""How long a process may take to end after it was asked to."""


class Losses:
    """Losses by step of the surviving timeline: a replayed step replaces the earlier one."""

    def __init__(self) -> None:
        self._by_step: dict[int, float] = {}
        self.last_step = 0
        """Newest step of the timeline."""
        self.num_replayed = 0
        """Steps that a rollback undid."""

    def add(self, step: int, loss: float) -> None:
        """Add one step."""
        if step <= self.last_step:
            self.num_replayed += self.last_step - step + 1
            for undone in range(step, self.last_step + 1):
                self._by_step.pop(undone, None)
        self._by_step[step] = loss
        self.last_step = step

    def series(self) -> list[tuple[int, float]]:
        """(step, loss) in order of steps; a copy."""
        return sorted(self._by_step.copy().items())

    def mean(self, step: int) -> float | None:
        """Mean of the `FINAL_STEPS` steps up to `step` (of fewer at the beginning); None when one is missing.

        Not finite when one of them is not.
        """
        wanted = range(max(1, step - FINAL_STEPS + 1), step + 1)
        losses = [self._by_step.get(number) for number in wanted]
        known = [loss for loss in losses if loss is not None]
        return sum(known) / len(known) if known and len(known) == len(losses) else None

    def final(self, steps: int) -> float | None:
        """Mean of the last `FINAL_STEPS` of `steps`; None when one is missing or the mean is not finite."""
        mean = self.mean(steps) if steps >= FINAL_STEPS else None
        return mean if mean is not None and math.isfinite(mean) else None


class TrainingProcess:
    """One worker, started at once. `errors` is the file for its standard error."""

    def __init__(self, spec: RunSpec, errors: Path) -> None:
        self.spec = spec
        self.losses = Losses()
        self.errors = errors
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "fp8watch.demo.worker", msgspec.json.encode(spec).decode()]
        with errors.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=environment
            )
        self._reader = threading.Thread(target=self._read, name="demo-losses", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                row = json.loads(line)
                self.losses.add(int(row["step"]), float(row["loss"]))
            except (ValueError, KeyError, TypeError):
                continue  # not one of our lines; a missing loss shows in the result

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """Exit code, once it has ended and all its losses have arrived; None before."""
        code = self._process.poll()
        return None if code is None or self._reader.is_alive() else code

    def wait(self) -> int:
        """Exit code; waits until it has ended and all its losses have arrived."""
        code = self._process.wait()
        self._reader.join()
        return code

    def stop(self) -> None:
        """End it if it is running."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reader.join(STOP_SECONDS)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def error_text(self, num_lines: int = 20) -> str:
        """The last lines of its standard error."""
        lines = self.errors.read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])
