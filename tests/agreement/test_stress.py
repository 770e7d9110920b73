"""Twenty of the random sequences of `bench/agreement_stress.py`; `make acceptance` plays two hundred."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "bench" / "agreement_stress.py"


def test_after_random_faults_and_actions_all_ranks_hold_the_same(tmp_path: Path) -> None:
    """Parameters step by step, the log of what was carried out and when, and the end."""
    out = tmp_path / "stress.json"
    command = [sys.executable, str(SCRIPT), "--sequences", "20", "--launches", "1", "--seed", "1", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 20
    assert all(row["pass"] for row in rows)
    # A run in which nothing happens would pass as well.
    carried_out = Counter(what["action"] for row in rows for what in row["log"])
    assert sum(carried_out.values()) >= 15
    assert carried_out["rollback"] >= 3
