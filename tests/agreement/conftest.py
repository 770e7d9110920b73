"""Ports come from what finds them for the stores' tests, threads that act as ranks from those of checkpoints."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from fp8watch.training.agreement import join as joining

for area in ("store", "checkpoints"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / area))


@pytest.fixture
def store(monkeypatch) -> dist.Store:
    """The job's store, in this process."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(joining, "_store", lambda meeting: dist.PrefixStore("m", store))
    return store
