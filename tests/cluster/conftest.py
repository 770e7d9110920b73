"""Hand-made messages are shared with the agent's tests, servers with the store's; a Redis of one test's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "agent"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "store"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Any]:
    """A `RedisStore` on a server of its own."""
    import cluster_parts as parts  # its own imports lie in the folders named above

    server = parts.Redis(tmp_path / "redis")
    server.start()
    opened = server.store()
    yield opened
    opened.close()
    server.kill()
