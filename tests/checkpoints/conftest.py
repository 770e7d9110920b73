from __future__ import annotations

import pytest

from fp8watch.checkpoints import manager as managers


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks hold copies, as under DistributedDataParallel."""
    monkeypatch.setattr(managers, "layout_of", lambda model, optimizer, world_size: "replicas")
