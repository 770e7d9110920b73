"""The shipped example runs as it stands, and a second run goes on where the first one stopped."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from types import ModuleType

import pytest

from fp8watch.controller.store_sqlite import SqliteStore
from fp8watch.records import StepFrame
from fp8watch.transport.places import run_folder

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_loop.py"


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stored_steps(path: Path, last: int, patience_seconds: float = 20.0) -> list[int]:
    """Steps in the store, once the background process has written the last one (sending does not wait for it)."""
    deadline = time.monotonic() + patience_seconds
    while True:
        steps: list[int] = []
        if path.exists():
            store = SqliteStore(path)
            steps = [frame.step for frame in store.read("example", StepFrame)]
            store.close()
        if steps[-1:] == [last] or time.monotonic() > deadline:
            return steps
        time.sleep(0.1)


def test_example_trains_and_resumes(example, tmp_path, monkeypatch, capsys, caplog):
    """With the real background process and store."""
    monkeypatch.setenv("FP8WATCH_REPORT", "1")
    monkeypatch.setenv("FP8WATCH_RUN", "example")
    assert example.main(["--steps", "40"]) < 2.0  # ln(64) = 4.16 before training
    assert "watching 3 of 3 FP8 modules" in capsys.readouterr().err
    assert stored_steps(run_folder(tmp_path / "fp8watch", "example") / "store.sqlite", 40) == list(range(1, 41))
    example.main(["--steps", "45"])
    assert "(step 40)" in caplog.text
