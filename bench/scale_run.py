"""One end-to-end run, for `bench/scale.py`: four agents, Redis, a controller and its standby, four training ranks.

Each rank trains for real behind the agent of its own node. At one step all scales of all ranks are broken; the finding,
the decision, and what every rank did and read back are read from Redis afterwards.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cluster"))
import cluster_parts as parts

from fp8watch.controller.cluster.redis_keys import LEASE
from fp8watch.records import ActionRecord, CommandResult, Finding

NODES, STEPS, FAULT_STEP = 4, 220, 120
BARS = {"decided_to_applied_steps": 5, "ranks_applied": NODES}


def measure_run(folder: Path) -> dict[str, Any]:
    """The row of scale.json."""
    with parts.cluster(folder) as made:
        nodes = [f"n{number}" for number in range(NODES)]
        for node in nodes:
            made.agent(node)
        made.controller("c0")
        made.controller("c1")
        store = made.redis.store()
        parts.wait_for(lambda: store.link.client.get(LEASE), 60, "a controller")
        began = time.monotonic()
        codes = train(made, nodes)
        seconds = time.monotonic() - began
        parts.wait_for(lambda: store.runs() and store.runs()[0].state == "ended", 60, "the end of the run")
        (run,) = [record.run for record in store.runs()]
        findings = [item for item in store.read(run, Finding) if item.severity == "act"]
        actions = {item.id: item for item in store.read(run, ActionRecord)}
        results = [item for item in store.read(run, CommandResult) if item.verb == "apply"]
        store.close()
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    done = [item for item in actions.values() if item.status == "applied"]
    shown = [describe(item, results) for item in done]
    row: dict[str, Any] = {
        "name": "run", "shape": f"{NODES} agents of 1 rank, {STEPS} steps, scales broken at step {FAULT_STEP}",
        "seconds": round(seconds, 1), "exit_codes": codes,
        "found": [[item.detector, item.cause, item.step] for item in findings[:8]],
        "fault_to_found_steps": findings[0].step - FAULT_STEP if findings else None, "actions": shown,
        "loss_before": mean([r["losses"][FAULT_STEP - 20 : FAULT_STEP] for r in ranks]),
        "loss_after": mean([r["losses"][-20:] for r in ranks]),
        "ranks_in_one_state": len({r["checksum"] for r in ranks}) == 1 and len(ranks) == NODES, "bars": BARS,
    }  # fmt: skip
    row["misses"] = [
        name
        for name, is_met in (
            ("exit_codes", codes == [0] * NODES),
            ("found", bool(findings) and findings[0].step >= FAULT_STEP),
            ("actions", bool(done)),
            ("decided_to_applied_steps", all(a["decided_to_applied_steps"] <= BARS["decided_to_applied_steps"]
                                             for a in shown)),
            ("ranks_applied", all(a["ranks_applied"] == NODES and a["is_one_step"] for a in shown)),
            ("readback", all(a["readback"] == "ok" for a in shown)),
            ("ranks_in_one_state", row["ranks_in_one_state"]),
        )
        if not is_met
    ]  # fmt: skip
    row["pass"] = not row["misses"]
    return row


def describe(action: ActionRecord, results: list[CommandResult]) -> dict[str, Any]:
    applied = {r.rank: r.step for r in results if r.id == action.id and r.status == "applied" and r.readback == "ok"}
    return {
        "action": action.action, "decided_step": action.decided_step, "applied_step": action.applied_step,
        "decided_to_applied_steps": (action.applied_step or 10**6) - action.decided_step,
        "ranks_applied": len(applied), "is_one_step": len(set(applied.values())) == 1, "readback": action.readback,
        "outcome": action.outcome,
    }  # fmt: skip


def train(made: parts.Cluster, nodes: list[str]) -> list[int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = str(Path(__file__).parent / "scale_rank.py")
    ranks = []
    for rank, node in enumerate(nodes):
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "LOCAL_RANK": "0",
            "WORLD_SIZE": str(NODES), "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "FP8WATCH_RUN": "whole", "FP8WATCH_AGENT": f"unix://{made.socket(node)}",
            "FP8WATCH_COMMAND_KEY": parts.KEYS["FP8WATCH_COMMAND_KEY"], "FP8WATCH_DIR": str(made.folder / "home"),
        }  # fmt: skip
        with (made.folder / f"rank-{rank}.log").open("wb") as log:
            command = [sys.executable, program, str(made.folder), str(STEPS), str(FAULT_STEP)]
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    made.on_end.append(lambda: [process.kill() for process in ranks])  # type: ignore[arg-type, return-value]
    return [process.wait(300) for process in ranks]


def mean(losses: list[list[float]]) -> float | None:
    values = [value for some in losses for value in some]
    return round(statistics.fmean(values), 5) if values else None
