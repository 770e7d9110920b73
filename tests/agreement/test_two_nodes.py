"""Two nodes under torchrun, whose restarted ranks are given the store of those before them: real processes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from pathlib import Path

import forked_ranks
from fake_controller import FakeController
from real_ranks import FOLDER, ROOT

ACTS = "{version: 1, mode: auto, rules: [{name: n, when: {detector: nonfinite}, ladder: [{action: halt}]}]}"


def test_ranks_that_were_started_again_act_and_resume_together(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sockets = Path(tempfile.mkdtemp(prefix="fp8w"))  # a socket's path is short
    controller = FakeController(sockets / "c.sock", {}, None)
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "FP8WATCH_AGENT": controller.address,
        "FP8WATCH_DIR": str(tmp_path / "fp8watch"), "FP8WATCH_REPORT": "0", "FP8WATCH_JOIN_SECONDS": "60",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "agent")]),
    }  # fmt: skip
    environment.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", None)
    logs = [tmp_path / f"stderr-{node}" for node in range(2)]
    options = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=job"]
    options += [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1", "--monitor-interval=0.1"]
    options += [str(FOLDER / "two_nodes_program.py"), str(tmp_path), ACTS]
    codes = forked_ranks.codes([forked_ranks.start_torchrun(options, environment, log) for log in logs], 200.0)
    controller.close()
    shutil.rmtree(sockets)
    said = "\n".join(log.read_text() for log in logs)
    assert codes == [0, 0], said[-6000:]
    lines = [[json.loads(line) for line in (tmp_path / f"{rank}.jsonl").read_text().splitlines()] for rank in (0, 1)]
    # What torch counts is no name for a start: the two nodes are not at one.
    assert [line["restarts"] for line in lines[0]] != [line["restarts"] for line in lines[1]]
    for first, second in zip(*lines, strict=True):
        assert (first["resumed"], first["attempt"]) == (second["resumed"], second["attempt"])
        assert first["why_not"] is second["why_not"] is None
    assert [line["resumed"] for line in lines[0]] == [0, 6, 12]
    assert "an earlier start" not in said
