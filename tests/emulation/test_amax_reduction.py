"""amax is reduced over ranks in one collective a direction and update."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

WORKER = Path(__file__).with_name("reduction_worker.py")
ROOT = Path(__file__).parents[2]


def test_two_ranks_share_the_larger_amax(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    outputs = []
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=60)
            assert rank.returncode == 0, err
            outputs.append(json.loads(out.strip().splitlines()[-1]))
    finally:
        for rank in ranks:
            rank.kill()
    zero, one = outputs
    assert zero["reduced"] == one["reduced"]
    # Rank 1 skipped layer 0 in the second step: its newest shared amax is rank 0's own.
    assert zero["reduced"]["scales"][0][0] == 448.0
    assert zero["reduced"]["calls"] == 4  # one a direction and step
    assert zero["local"]["calls"] == one["local"]["calls"] == 0
    assert zero["local"]["scales"][0][0] == 448.0
    assert one["local"]["scales"][0][0] == 448.0 / 4
    # The second layer's input differs between ranks; both must use the larger one.
    larger = min(zero["local"]["scales"][1][0], one["local"]["scales"][1][0])
    torch.testing.assert_close(zero["reduced"]["scales"][1][0], larger, rtol=0.1, atol=0.0)
