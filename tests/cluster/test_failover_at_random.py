"""The active controller is killed at a random moment: nothing decided is lost and nothing is done twice.

A hundred times in a row it is done by `bench/failover.py`.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import failover


@pytest.mark.redis
def test_nothing_is_lost_or_repeated_over_a_kill(tmp_path: Path) -> None:
    row = failover.run(tmp_path, 1, random.Random(), 1.0)
    assert row["problems"] == []
    assert row["commands"] > 0
    assert row["takeover_max_seconds"] < failover.BAR_SECONDS
