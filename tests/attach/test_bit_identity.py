"""Attached, observing or armed, a healthy run is bit-identical to a process in which fp8watch was never attached."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from watched_training import stored_steps

from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.records import CheckpointRecord, StepFrame

PROGRAM = Path(__file__).with_name("bit_identity_program.py")
COMPARED = (
    "losses", "parameters", "buffers", "optimizer", "scheduler", "torch_rng", "python_rng", "numpy_rng",
)  # fmt: skip


def run(mode: str, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FP8WATCH_")}
    environment |= {
        "OMP_NUM_THREADS": "1", "FP8WATCH_DIR": str(folder / "fp8watch"), "FP8WATCH_RUN": mode,
        "FP8WATCH_METRICS_PORT": "0", "FP8WATCH_WHAT_IF_EVERY": "3", "FP8WATCH_SHADOW_EVERY": "2",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-W", "error", str(PROGRAM), mode], cwd=folder, env=environment, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["stderr"] = done.stderr
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run("bare", tmp_path_factory.mktemp("bare") / "run")


def test_the_bare_process_never_imported_attach(bare):
    assert not bare["imported"]
    assert len(set(bare["losses"])) == len(bare["losses"]) == 30


@pytest.mark.parametrize("mode", ["observe", "auto"])
def test_attached_is_bit_identical(bare, mode, tmp_path):
    attached = run(mode, tmp_path / mode)
    assert attached["imported"]
    assert attached["failures"] == {}, attached["stderr"]
    assert {name: attached[name] for name in COMPARED} == {name: bare[name] for name in COMPARED}
    # And it did watch: every step arrived, and checkpoints were written meanwhile.
    path = tmp_path / mode / "fp8watch" / "runs" / mode / "store.sqlite"
    assert stored_steps(path, mode, 30) == list(range(1, 31))
    store = SqliteStore(path)
    try:
        assert {record.step for record in store.read(mode, CheckpointRecord)} >= {10, 20}
        closer = [frame for frame in store.read(mode, StepFrame) if "shadow_error" in frame.columns]
        assert len(closer) == 14  # every second step but the first had a probe
    finally:
        store.close()
