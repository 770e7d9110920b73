"""Runs programs with kernels in Triton's interpreter, which has to be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent


def run(program: str) -> None:
    """Run a program of this folder in the interpreter. Raises `AssertionError` with what it printed."""
    path = os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(HERE / program)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith("equal")


def report(differences: Iterable[str]) -> int:
    """What a program ends with: its exit status."""
    wrong = list(differences)
    print("\n".join(wrong) or "equal")
    return min(len(wrong), 1)
