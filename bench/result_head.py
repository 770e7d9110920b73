"""The first fields of every file under bench/results: commit, date, versions, machine and command, as found."""

from __future__ import annotations

import datetime
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def head(command: str | None = None, **versions: str) -> dict[str, Any]:
    """The first fields of a result. `command`: what follows `python `; None: this process's own."""
    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **versions},
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)},
        "command": f"python {command or own_command()}",
    }


def commit() -> str:
    """The commit that is checked out; empty without git."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def own_command() -> str:
    """Script and arguments of this process."""
    return " ".join([f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def redis_version() -> str:
    """Version of the server on the PATH, e.g. `7.0.15`; empty when there is none."""
    server = shutil.which("redis-server")
    if server is None:
        return ""
    said = subprocess.run([server, "--version"], capture_output=True, text=True, check=False).stdout
    return next((word.removeprefix("v=") for word in said.split() if word.startswith("v=")), "")


def as_text(report: dict[str, Any]) -> str:
    """The file's content, with a row on a line. Raises `ValueError` for a number that JSON does not know."""
    fields = json.dumps({key: value for key, value in report.items() if key != "rows"}, indent=1, allow_nan=False)
    rows = ",\n  ".join(json.dumps(row, allow_nan=False, separators=(",", ":")) for row in report["rows"])
    return f'{fields[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n'


def interval(values: Sequence[float]) -> list[float]:
    """Bootstrap 95 % interval of the median."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(2000))
    return [medians[49], medians[1949]]
