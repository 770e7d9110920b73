"""The shipped example runs as it stands, and a second run goes on where the first one stopped."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from watched_training import stored_steps

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


def test_example_trains_and_resumes(example, tmp_path, monkeypatch, capsys, caplog):
    """With the real background process and store."""
    monkeypatch.setenv("FP8WATCH_REPORT", "1")
    monkeypatch.setenv("FP8WATCH_RUN", "example")
    assert example.main(["--steps", "40"]) < 2.0  # ln(64) = 4.16 before training
    assert "watching 3 of 3 FP8 modules" in capsys.readouterr().err
    assert stored_steps(run_folder(tmp_path / "fp8watch", "example") / "store.sqlite", "example", 40) == list(
        range(1, 41)
    )
    example.main(["--steps", "45"])
    assert "(step 40)" in caplog.text
