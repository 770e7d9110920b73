from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from watched_training import START, RecordingChannel, Trainer

import fp8watch.training.attachment as attachment
from fp8watch.training.agreement import join as joining


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("FP8WATCH_DISARM", "FP8WATCH_RUN", "FP8WATCH_AGENT", "RANK", "WORLD_SIZE", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FP8WATCH_DIR", str(tmp_path / "fp8watch"))
    monkeypatch.setenv("FP8WATCH_REPORT", "0")
    monkeypatch.setattr(joining, "new_start", lambda: START)
    yield
    for entry in list(attachment._attached):
        entry.watch.detach()


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Callable[[], RecordingChannel]:
    """Replaces the transport; call it for the channel of the newest attach."""
    monkeypatch.setattr("fp8watch.training.assemble.Channel", RecordingChannel)
    RecordingChannel.made.clear()
    return lambda: RecordingChannel.made[-1]


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()
