"""What agent and controller cost at scale, over a real Redis.

    python bench/scale.py [--part agent controller memory run] [--seconds 45] [--ranks 8 64 256 1024] [--out FILE]

agent: one real agent on its unix socket, fed by a generator process: 8 ranks x 1,680 tensors x 10 steps/s, every tenth
step with element counts. Measured: CPU share and memory of the agent, time of a scrape, series shown.

controller: one real controller, fed by a generator process with pre-built frames of 8 ranks per node, 2 steps/s: 1, 8,
32 and 128 nodes. Measured: CPU share and memory of the controller; the delay from the creation of a frame with a fault
to its finding in Redis; traffic into Redis and its memory, and what ten minutes of it amount to. The generators' CPU is
given separately. CPU share: CPU seconds of the process per second of wall time, 1.0 is one core. Wait share: the same
for the time in which it wanted a core and had none (because of other work; it is part of every delay).

memory: the same with one node, at as many steps per second as it takes to fill the windows of 1,024 updates twice: the
controller's memory by steps judged.

run: four agents, a controller and its standby, four real training ranks (`bench/scale_run.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
from result_head import as_text, head, redis_version
from scale_run import measure_run

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cluster"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "agent"))
import cluster_parts as parts
import hand_made as make

from fp8watch import wire
from fp8watch.columns import pack
from fp8watch.controller.cluster import node_frames
from fp8watch.controller.cluster.redis_keys import ACTIVE, LEASE, RunKeys
from fp8watch.records import ACTIONS, Column, Finding, Hello, Layout, NodeFrame, StepFrame, TensorColumn
from fp8watch.security.envelope import Sealer
from fp8watch.security.keyring import KeyRing
from fp8watch.transport import endpoint

TENSORS, RANKS_A_NODE = 1680, 8
FAULTY_EVERY = 30
"""Steps between two steps with a non-finite loss."""
BARS = {"agent_cpu": 0.10, "agent_rss_mib": 200.0, "scrape_seconds": 0.1, "series": 5000, "controller_cpu": 1.0,
        "finding_seconds": 2.0, "growth_of_second_half": 1.1}  # fmt: skip
CROWDED = 0.1
_POLICY = "version: 1\nmode: observe\nrules: []\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", default=["agent", "controller", "memory", "run"])
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "scale.json")
    parser.add_argument("--feed", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, default=2.0, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.feed:
        kind, where, number = chosen.feed
        if kind == "agent":
            return feed_agent(where, chosen.seconds)
        return feed_redis(where, int(number), chosen.seconds, chosen.rate)
    rows: list[dict[str, Any]] = []
    if "agent" in chosen.part:
        rows.append(measured(lambda folder: measure_agent(folder, chosen.seconds)))
    if "controller" in chosen.part:
        for ranks in chosen.ranks:
            rows.append(measured(lambda folder, ranks=ranks: measure_controller(folder, ranks, chosen.seconds)))
    if "memory" in chosen.part:
        rows.append(measured(measure_memory))
    if "run" in chosen.part:
        rows.append(measured(measure_run))
    report = head(redis=redis_version()) | {"rows": rows}
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(as_text(report))
    return 1 if any(row["pass"] is False for row in rows) else 0


def measured(measure: Any) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="fp8watch-scale-"))
    try:
        row: dict[str, Any] = measure(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(row), flush=True)
    return row


# The agent


def measure_agent(folder: Path, seconds: float) -> dict[str, Any]:
    with parts.cluster(folder) as made:
        agent = made.agent("n0", "--log-level", "WARNING")
        feeder = _feeder("agent", str(made.socket("n0")), "0", seconds + 6)
        parts.wait_for(lambda: any(endpoint.read_all(folder / "n0")), 60, "the run")
        url = next(endpoint.read_all(folder / "n0")).metrics_url
        parts.wait_for(lambda: make.scrape(url).get('fp8watch_step{run="scale"}', 0) > 30, 60, "steps")
        process, generator = psutil.Process(agent.pid), psutil.Process(feeder.pid)
        began, cpu, cpu_generator = time.monotonic(), _cpu(process), _cpu(generator)
        waited = _waited(process)
        first = make.scrape(url)['fp8watch_step{run="scale"}']
        scrapes, shown = [], {}
        while time.monotonic() - began < seconds:
            time.sleep(3.0)
            at = time.monotonic()
            shown = make.scrape(url)
            scrapes.append(time.monotonic() - at)
        wall = time.monotonic() - began
        rss = process.memory_info().rss / 2**20
        row = {
            "name": "agent", "shape": f"{RANKS_A_NODE} ranks x {TENSORS} tensors",
            "steps_per_second": round((shown['fp8watch_step{run="scale"}'] - first) / wall, 2),
            "seconds": round(wall, 1), "cpu_share": round((_cpu(process) - cpu) / wall, 4),
            "wait_share": round((_waited(process) - waited) / wall, 4),
            "generator_cpu_share": round((_cpu(generator) - cpu_generator) / wall, 4), "rss_mib": round(rss, 1),
            "scrape_median_seconds": round(statistics.median(scrapes), 4),
            "scrape_max_seconds": round(max(scrapes), 4), "series": len(shown),
            "sent_bytes_per_second": round(
                shown['fp8watch_agent_sent_bytes_total{node="n0"}'] / shown['fp8watch_step{run="scale"}'] * 10
            ),
            "lost": sum(value for name, value in shown.items() if "agent_lost" in name or "frames_dropped" in name),
        }  # fmt: skip
        parts.end(feeder)
    row["bars"] = {name: BARS[name] for name in ("agent_cpu", "agent_rss_mib", "scrape_seconds", "series")}
    judge(row, cpu_share="agent_cpu", rss_mib="agent_rss_mib", scrape_median_seconds="scrape_seconds", series="series")
    return row


def judge(row: dict[str, Any], **bars: str) -> None:
    """Compare figures with their bars. Timings are not measurable where the process had to wait for a core for more
    than `CROWDED` of the time: then `pass` is null, neither yes nor no."""
    over = [name for name, bar in bars.items() if row[name] is None or row[name] > BARS[bar]]
    is_crowded = row.get("wait_share", 0.0) > CROWDED
    row["not_measurable"] = [name for name in over if name.endswith("_seconds") and is_crowded]
    row["misses"] = [name for name in over if name not in row["not_measurable"]]
    row["pass"] = False if row["misses"] else None if row["not_measurable"] else True


def columns_of_model() -> list[TensorColumn]:
    modules = [
        f"layers.{layer}.{name}" for layer in range(80) for name in ("qkv", "proj", "gate", "up", "down", "norm", "o")
    ]
    return [
        TensorColumn(module=module, tensor=tensor, block=module.split(".")[1], fp8_format="e4m3", history_len=1024)  # type: ignore[arg-type]
        for module in modules
        for tensor in ("input", "weight", "grad_output")
    ][:TENSORS]


def columns_of_step(step: int, *, is_faulty: bool = False, seed: int = 0) -> dict[str, Column]:
    dice = np.random.default_rng(1000 * seed + step)
    amax = (1.0 + 0.05 * dice.random(TENSORS)).astype(np.float32)
    if step % 10 == 1:  # the largest of the window, from which delayed scaling computes the scale below
        amax[:] = 1.05
    found = {"amax": pack(amax, "f4"), "scale": pack(np.full(TENSORS, 448.0 / 1.05, np.float32), "f4")}
    found["high_precision"] = pack(np.zeros(TENSORS, np.uint8), "u1")
    if step % 10 == 0:
        found["quantized"] = pack(np.full(TENSORS, 1 << 20, np.uint64), "u8")
        found["saturated"] = pack(np.zeros(TENSORS, np.uint64), "u8")
        found["underflowed"] = pack(dice.integers(0, 100, TENSORS).astype(np.uint64), "u8")
        found["nonfinite"] = pack(np.zeros(TENSORS, np.uint64), "u8")
    return found


def scalars_of_step(step: int, rank: int, *, is_faulty: bool = False) -> dict[str, float]:
    return {
        "loss": float("nan") if is_faulty else 2.0 + 0.01 * ((step * 7 + rank) % 5), "grad_norm": 1.0,
        "learning_rate": 1e-3, "lr_factor": 1.0, "update_rms": 1e-4, "update_ratio": 1e-4, "clip_limit": 1.0,
        "tokens": 8192.0, "samples": 8.0 * step, "step_seconds": 0.1, "overhead_seconds": 1e-4, "bf16_modules": 0.0,
    }  # fmt: skip


def feed_agent(path: str, seconds: float) -> int:
    """Eight ranks on one agent's socket, 10 steps per second; frames are built beforehand."""
    announced = columns_of_model()
    clients = [make.RawClient(path) for _ in range(RANKS_A_NODE)]
    for rank, client in enumerate(clients):
        client.send(
            make.hello("scale", rank=rank, world_size=RANKS_A_NODE, policy=_POLICY),
            Layout(run="scale", attempt=0, rank=rank, layout_id=1, columns=announced, expected_modules=560,
                   observed_modules=560),
        )  # fmt: skip
    bodies = [columns_of_step(step, seed=rank) for rank in range(RANKS_A_NODE) for step in range(1, 11)]
    began = time.monotonic()
    for step in range(1, int(seconds * 10)):
        for rank, client in enumerate(clients):
            frame = StepFrame(
                run="scale", attempt=0, rank=rank, step=step, layout_id=1, time_unix=time.time(),
                scalars=scalars_of_step(step, rank), columns=bodies[10 * rank + (step - 1) % 10],
            )  # fmt: skip
            client.send(frame)
        time.sleep(max(0.0, began + step / 10 - time.monotonic()))
    return 0


# The controller


def measure_controller(folder: Path, ranks: int, seconds: float) -> dict[str, Any]:
    nodes = max(1, ranks // RANKS_A_NODE)
    with parts.cluster(folder, "--appendonly", "no", environment={"FP8WATCH_LOG_LEVEL": "WARNING"}) as made:
        controller = made.controller("c0")
        store = made.redis.store()
        client = store.link.client
        parts.wait_for(lambda: client.get(LEASE), 30, "a controller")
        feeder = _feeder("redis", str(made.redis.path), str(nodes), seconds + 6)
        parts.wait_for(lambda: store.runs() and store.runs()[0].last_step >= 8, 120, "steps")
        process, generator = psutil.Process(controller.pid), psutil.Process(feeder.pid)
        server = psutil.Process(made.redis.process.pid if made.redis.process else 0)
        began, cpu, cpu_generator, cpu_server = time.monotonic(), _cpu(process), _cpu(generator), _cpu(server)
        waited, waited_generator = _waited(process), _waited(generator)
        first, bytes_in = store.runs()[0].last_step, client.info("stats")["total_net_input_bytes"]
        delays: list[float] = []
        seen: set[str] = set()
        while time.monotonic() - began < seconds:
            for finding in store.read("scale", Finding):
                if finding.id not in seen and finding.detector == "nonfinite":
                    seen.add(finding.id)
                    made_at = float(client.hget("scale-made", str(finding.step)) or 0)
                    delays.append(time.time() - made_at)
            time.sleep(0.1)
        wall = time.monotonic() - began
        last, bytes_out = store.runs()[0].last_step, client.info("stats")["total_net_input_bytes"]
        lag = store.link.client.xinfo_groups(RunKeys("scale").frames)[0].get("lag")
        entries = client.xlen(RunKeys("scale").frames)
        memory = client.memory_usage(RunKeys("scale").frames, samples=0) or 0
        row = {
            "name": "controller", "shape": f"{nodes} nodes, {nodes * RANKS_A_NODE} ranks x {TENSORS} tensors",
            "node_frames_per_second": 2 * nodes, "steps_judged_per_second": round((last - first) / wall, 3),
            "seconds": round(wall, 1), "cpu_share": round((_cpu(process) - cpu) / wall, 4),
            "wait_share": round((_waited(process) - waited) / wall, 4),
            "generator_cpu_share": round((_cpu(generator) - cpu_generator) / wall, 4),
            "generator_wait_share": round((_waited(generator) - waited_generator) / wall, 4),
            "redis_cpu_share": round((_cpu(server) - cpu_server) / wall, 4),
            "rss_mib": round(process.memory_info().rss / 2**20, 1), "findings": len(delays),
            "finding_median_seconds": round(statistics.median(delays), 3) if delays else None,
            "finding_max_seconds": round(max(delays), 3) if delays else None, "lag_entries_at_end": lag,
            "redis_in_bytes_per_second": round((bytes_out - bytes_in) / wall),
            "redis_bytes_per_entry": round(memory / max(1, entries)),
            "redis_bytes_ten_minutes": round(memory / max(1, entries) * 2 * nodes * 600),
            "memory_of_run_bytes": client.hstrlen(RunKeys("scale").state, "memory"),
            "bars": {"controller_cpu": BARS["controller_cpu"], "finding_seconds": BARS["finding_seconds"]},
        }  # fmt: skip
        parts.end(feeder)
        store.close()
    judge(row, cpu_share="controller_cpu", finding_max_seconds="finding_seconds")
    return row


def measure_memory(folder: Path) -> dict[str, Any]:
    marks = (600, 1200, 1800, 2400)
    with parts.cluster(folder, "--appendonly", "no", environment={"FP8WATCH_LOG_LEVEL": "WARNING"}) as made:
        controller = made.controller("c0")
        store = made.redis.store()
        parts.wait_for(lambda: store.link.client.get(LEASE), 30, "a controller")
        feeder = _feeder("redis", str(made.redis.path), "1", 600.0, rate=40.0)
        process, rss = psutil.Process(controller.pid), {}
        for steps in marks:
            parts.wait_for(
                lambda steps=steps: store.runs() and store.runs()[0].last_step >= steps, 240, f"step {steps}"
            )
            rss[steps] = round(process.memory_info().rss / 2**20, 1)
        remembered = store.link.client.hstrlen(RunKeys("scale").state, "memory")
        parts.end(feeder)
        store.close()
    growth = round(rss[marks[-1]] / rss[marks[1]], 3)
    row = {
        "name": "memory", "shape": f"1 node, {RANKS_A_NODE} ranks x {TENSORS} tensors, {marks[-1]} steps",
        "rss_mib_by_steps": rss, "growth_of_second_half": growth, "memory_of_run_bytes": remembered,
        "bars": {"growth_of_second_half": BARS["growth_of_second_half"]},
    }  # fmt: skip
    row["misses"] = ["growth_of_second_half"] if growth > BARS["growth_of_second_half"] else []
    row["pass"] = not row["misses"]
    return row


def feed_redis(path: str, nodes: int, seconds: float, rate: float) -> int:
    """Sealed frames of `nodes` agents into Redis, `rate` steps per second; columns are encoded beforehand."""
    import redis

    client = redis.Redis(unix_socket_path=path)
    announced = columns_of_model()
    keys = RunKeys("scale")
    order = node_frames.NodeLayout()
    for local in range(RANKS_A_NODE):
        order.add(local, 1, announced)
    ring = KeyRing("frame", (parts.KEYS["FP8WATCH_FRAME_KEY"].encode(),))
    sealers = [Sealer(f"n{node}", 1, ring) for node in range(nodes)]
    encoder = msgspec.msgpack.Encoder()

    def add(pipe: Any, node: int, message: Any, kind: str) -> None:
        pipe.xadd(keys.frames, {"k": kind, "e": encoder.encode(sealers[node].seal(wire.pack(message)))})

    with client.pipeline(transaction=False) as pipe:
        for rank, hello in enumerate(_hellos(nodes * RANKS_A_NODE)):
            add(pipe, rank // RANKS_A_NODE, hello, "m")
        pipe.execute()
    for node in range(nodes):
        with client.pipeline(transaction=False) as pipe:
            layout = Layout(
                run="scale", attempt=0, rank=node * RANKS_A_NODE, layout_id=1, columns=announced,
                expected_modules=560, observed_modules=560,
            )  # fmt: skip
            add(pipe, node, layout, "m")
            pipe.set(keys.presence(f"n{node}"), "1")
            pipe.execute()
    client.sadd(ACTIVE, "scale")
    reduced = []
    for step in range(1, 11):
        single = [
            StepFrame(run="scale", attempt=0, rank=local, step=step, layout_id=1, time_unix=0.0, scalars={},
                      columns=columns_of_step(step, seed=local))
            for local in range(RANKS_A_NODE)
        ]  # fmt: skip
        reduced.append(node_frames.reduce(single, order, node="", layout_id=1, lead=0).columns)
    parts.wait_for(lambda: client.exists(keys.run), 120, "the run")
    began = time.monotonic()
    for step in range(1, int(seconds * rate)):
        is_faulty = step % FAULTY_EVERY == 0
        client.hset("scale-made", str(step), time.time())
        for start in range(0, nodes, 16):
            with client.pipeline(transaction=False) as pipe:
                for node in range(start, min(nodes, start + 16)):
                    own = range(node * RANKS_A_NODE, (node + 1) * RANKS_A_NODE)
                    frame = NodeFrame(
                        run="scale", attempt=0, node=f"n{node}", rank=own[0], step=step, layout_id=1,
                        time_unix=time.time(), ranks=list(own),
                        scalars=[scalars_of_step(step, rank, is_faulty=is_faulty) for rank in own],
                        columns=reduced[(step - 1) % 10],
                    )  # fmt: skip
                    add(pipe, node, frame, "n")
                pipe.execute()
        time.sleep(max(0.0, began + step / rate - time.monotonic()))
    return 0


def _hellos(ranks: int) -> list[Hello]:
    return [
        Hello(
            wire_version=wire.WIRE_VERSION, run="scale", attempt=0, rank=rank, local_rank=rank % RANKS_A_NODE,
            world_size=ranks, pid=1, host=f"h{rank // RANKS_A_NODE}", time_unix=time.time(), step=0,
            policy=_POLICY, policy_name="scale", capabilities=dict.fromkeys(ACTIONS, ""),
        )
        for rank in range(ranks)
    ]  # fmt: skip


def _feeder(kind: str, where: str, number: str, seconds: float, *, rate: float = 2.0) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--feed", kind, where, number, "--seconds", str(seconds), "--rate", str(rate)]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


def _waited(process: psutil.Process) -> float:
    """Seconds for which the threads of a process have waited for a core so far."""
    files = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[1]) for file in files) / 1e9


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    raise SystemExit(main())
