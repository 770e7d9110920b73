"""What a training rank notices when a part of the cluster fails, and what is lost: real processes, one fault a run.

    python bench/faults.py [--only NAME ...] [--steps 500] [--out FILE]

A real trainer (a small model in emulated FP8, attached to an agent over its unix socket, paced at 50 steps/s), a real
agent, Redis and controller. In the middle third of the run the fault is on. Measured on the training thread: time
spent inside `watch.step` (wall and CPU, 99.9 % and median); the run's total time against the run without a fault; the
frames missing in Redis afterwards; the metric and the log line that say what happened; how long after the fault's end
the controller had judged all steps. On a machine that other work shares the wall times hold that work's interruptions
too: `none` is the measure to compare with.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from result_head import head, redis_version

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cluster"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "agent"))
import cluster_parts as parts
import hand_made as make

from fp8watch.controller.redis_keys import LEASE
from fp8watch.records import StepFrame
from fp8watch.transport import endpoint

BARS = {"step_p999_ms": 5.0, "step_cpu_p50_ms": 1.0, "total_ratio": 1.02, "frames_missing": 0}
PACE_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Fault:
    """`begin` and `end` act on the cluster; `metric` and `line` are to be seen afterwards; `may_lose` frames."""

    begin: Callable[[parts.Cluster], None]
    end: Callable[[parts.Cluster], None]
    metric: str = ""
    line: str = ""
    may_lose: int = 0


def _nothing(made: parts.Cluster) -> None:
    pass


def _redis(number: int) -> Callable[[parts.Cluster], None]:
    def act(made: parts.Cluster) -> None:
        assert made.redis.process is not None
        os.kill(made.redis.process.pid, number)

    return act


def _restart_empty(made: parts.Cluster) -> None:
    for path in made.redis.folder.glob("appendonlydir/*"):
        path.unlink()
    made.redis.start()


def _asked(*command: str) -> Callable[[parts.Cluster], None]:
    def act(made: parts.Cluster) -> None:
        store = made.redis.store()
        store.link.client.execute_command(*command)
        store.close()

    return act


def _garbage(made: parts.Cluster) -> None:
    for size in (4, 1000, 100_000):
        client = make.RawClient(made.socket("n0"))
        client.send(make.hello("garbage", rank=0))
        client.socket.sendall(os.urandom(size))
        client.close()


UP = "fp8watch_agent_redis_errors_total"
FAULTS: dict[str, Fault] = {
    "none": Fault(_nothing, _nothing),
    "redis-killed": Fault(lambda m: m.redis.kill(), lambda m: m.redis.start(), UP, "frames go to the spool"),
    "redis-restarted-empty": Fault(lambda m: m.redis.kill(), _restart_empty, UP, "has lost run", may_lose=10_000),
    "redis-frozen": Fault(_redis(signal.SIGSTOP), _redis(signal.SIGCONT), UP, "frames go to the spool"),
    "redis-full": Fault(_asked("CONFIG", "SET", "maxmemory", "1mb"), _asked("CONFIG", "SET", "maxmemory", "0"), UP,
                        "out_of_memory"),
    "redis-read-only": Fault(_asked("REPLICAOF", "127.0.0.1", "1"), _asked("REPLICAOF", "NO", "ONE"), UP, "read_only"),
    "agent-killed": Fault(lambda m: m.agents["n0"].kill(), lambda m: _again(m), may_lose=8, line="forwards to redis"),
    "agent-frozen": Fault(lambda m: m.agents["n0"].freeze(), lambda m: m.agents["n0"].thaw()),
    "controller-killed": Fault(lambda m: m.controllers[0].kill(), _nothing, line="active under term 2"),
    "controller-frozen": Fault(lambda m: m.controllers[0].freeze(), lambda m: m.controllers[0].thaw(),
                               line="active under term 2"),
    "garbage-rank": Fault(_garbage, _nothing, "fp8watch_frames_dropped_total"),
}  # fmt: skip


def _again(made: parts.Cluster) -> None:
    made.agent("n0")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "faults.json")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.train is not None:
        return train(chosen.train, chosen.steps)
    known: dict[str, dict[str, Any]] = {}
    if chosen.out.exists():
        known = {row["name"]: row for row in json.loads(chosen.out.read_text())["rows"]}
    for name in chosen.only:
        folder = Path(tempfile.mkdtemp(prefix="fp8watch-faults-"))
        try:
            known[name] = run(folder, name, FAULTS[name], chosen.steps)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        judge(known[name], known.get("none"))
        print(json.dumps(known[name]), flush=True)
        write(chosen.out, [known[key] for key in FAULTS if key in known])
    return 0 if all(row["pass"] for row in known.values()) else 1


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    report = head(redis=redis_version()) | {"bars": BARS, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def run(folder: Path, name: str, fault: Fault, steps: int) -> dict[str, Any]:
    with parts.cluster(folder, environment={"FP8WATCH_LEASE_SECONDS": "1.5"}) as made:
        made.agent("n0")
        made.controller("a")
        store = made.redis.store()
        parts.wait_for(lambda: store.link.client.get(LEASE), 30, "a controller")
        made.controller("b")
        environment = {
            **os.environ, "FP8WATCH_AGENT": f"unix://{made.socket('n0')}", "FP8WATCH_RUN": "r", "OMP_NUM_THREADS": "1",
            "FP8WATCH_DIR": str(folder / "home"),
        }  # fmt: skip
        result = folder / "result.json"
        command = [sys.executable, __file__, "--train", str(result), "--steps", str(steps)]
        with (folder / "trainer.log").open("wb") as log:
            trainer = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        progress = result.with_suffix(".step")
        parts.wait_for(lambda: _step(progress) >= steps // 3, 120, "a third of the run")
        url = next(found.metrics_url for found in endpoint.read_all(folder / "n0"))
        fault.begin(made)
        until = time.monotonic() + steps / 3 * PACE_SECONDS
        while time.monotonic() < until and trainer.poll() is None:
            time.sleep(0.05)
        ender = threading.Thread(target=fault.end, args=(made,))
        ended = time.monotonic()
        ender.start()
        code = trainer.wait(120)
        ender.join()
        seen = json.loads(result.read_text()) if result.exists() else {}

        def is_judged() -> bool:
            try:
                runs = store.runs()
            except Exception:
                return False
            return bool(runs) and max(r.last_step for r in runs if r.run == "r") >= steps

        try:
            parts.wait_for(is_judged, 30, "all steps judged")
            recovered: float | None = round(time.monotonic() - ended, 2)
        except AssertionError:
            recovered = None
        here = {frame.step for frame in store.read("r", StepFrame)}
        # An agent that was started again has another port; it counts from nothing anyhow.
        shown = make.scrape(url) if name != "agent-killed" else {}
        text = "".join(path.read_text(errors="replace") for path in folder.glob("*.log"))
        store.close()
    return {
        "name": name, "exit_code": code, "steps": steps, **seen, "frames_missing": steps - len(here),
        "frames_that_may_be_lost": fault.may_lose, "recovered_seconds": recovered,
        "metric": {key: n for key, n in shown.items() if fault.metric and key.startswith(fault.metric) and n},
        "line": next((line for line in text.splitlines() if fault.line and fault.line in line), "")[-200:],
        "wants_metric": bool(fault.metric), "wants_line": bool(fault.line), "errors": text.count("Traceback"),
    }  # fmt: skip


def judge(row: dict[str, Any], without: dict[str, Any] | None) -> None:
    """Hold a row against the bars; the ratio is to the run without a fault."""
    if without is not None and row.get("total_seconds") and without.get("total_seconds"):
        row["total_ratio"] = round(row["total_seconds"] / without["total_seconds"], 4)
    row["misses"] = [
        name
        for name, is_met in (
            ("exit_code", row["exit_code"] == 0), ("step_p999_ms", row.get("step_p999_ms", 99) <= BARS["step_p999_ms"]),
            ("step_cpu_p50_ms", row.get("step_cpu_p50_ms", 99) <= BARS["step_cpu_p50_ms"]),
            ("total_ratio", row.get("total_ratio", 1.0) <= BARS["total_ratio"]),
            ("frames_missing", row["frames_missing"] <= row["frames_that_may_be_lost"]),
            ("recovered", row["recovered_seconds"] is not None), ("errors", row["errors"] == 0),
            ("metric", bool(row["metric"]) or not row["wants_metric"]),
            ("line", bool(row["line"]) or not row["wants_line"]),
        )
        if not is_met
    ]  # fmt: skip
    # Where even the run without a fault misses a bar of the clock, the machine is too busy to tell.
    noisy = [name for name in ("step_p999_ms", "total_ratio") if without is not None and _is_noisy(without)]
    row["not_measurable"] = [name for name in row["misses"] if name in noisy]
    row["misses"] = [name for name in row["misses"] if name not in noisy]
    row["pass"] = not row["misses"]


def _is_noisy(without: dict[str, Any]) -> bool:
    paced = without["steps"] * PACE_SECONDS
    return bool(without["step_p999_ms"] > BARS["step_p999_ms"] or without["total_seconds"] > 1.01 * paced)


def train(result: Path, steps: int) -> int:
    """The trainer: paced, and timed on its own thread."""
    import torch
    from torch import nn

    import fp8watch
    from fp8watch.emulation import convert

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64))
    convert(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(16, 64), torch.randn(16, 64)
    watch = fp8watch.attach(model, optimizer, policy="observe")
    wall: list[float] = []
    cpu: list[float] = []
    waited = 0
    began = time.monotonic()
    for step in range(1, steps + 1):
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        watch.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        at, at_cpu = time.perf_counter(), time.thread_time()
        watch.step(loss)
        wall.append(time.perf_counter() - at)
        cpu.append(time.thread_time() - at_cpu)
        waited += resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw > waits
        if step % 10 == 0:
            result.with_suffix(".step").write_text(str(step))
        time.sleep(max(0.0, began + step * PACE_SECONDS - time.monotonic()))
    total = time.monotonic() - began
    watch.detach()

    def at_share(values: list[float], share: float) -> float:
        return round(1000 * sorted(values)[min(len(values) - 1, int(share * len(values)))], 3)

    result.write_text(
        json.dumps(
            {
                "step_p50_ms": at_share(wall, 0.5), "step_p99_ms": at_share(wall, 0.99),
                "step_p999_ms": at_share(wall, 0.999),
                "step_cpu_p50_ms": at_share(cpu, 0.5), "step_cpu_p999_ms": at_share(cpu, 0.999),
                "steps_that_waited": waited, "total_seconds": round(total, 3),
            }
        )
    )  # fmt: skip
    return 0


def _step(path: Path) -> int:
    text = path.read_text() if path.exists() else ""
    return int(text) if text.isdigit() else 0


if __name__ == "__main__":
    raise SystemExit(main())
