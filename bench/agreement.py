"""What agreeing costs per step: the same training steps with and without the vote at each boundary, real ranks on gloo.

    python bench/agreement.py [--ranks 2 4 8] [--blocks 30] [--steps 20] [--out FILE]

Each rank does a fixed piece of work and an all-reduce of gradients, as data-parallel training does; blocks of steps
with and without the vote alternate in one process. `votes` is the vote at each boundary, started at one boundary and
waited for at the next; `votes and verdicts` also asks the other ranks before each optimizer step, as happens while
updates may be skipped. The bar is on `call_ms`, what the training thread spends in these calls: the median over steps.
`added_ms` is how much longer a step of a block gets. With fewer cores than threads (see `machine`), that is mostly time
in which other threads hold the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from result_head import as_text, head, interval

from fp8watch.identity import Identity
from fp8watch.settings import Settings
from fp8watch.training.agreement import AllRanks
from fp8watch.training.agreement.join import join

KINDS = ("votes", "votes and verdicts")
BARS_MS = {"votes": 1.0, "votes and verdicts": None}
"""Limit of `call_ms`, the median per step. Asking before each step has no bar of its own."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--blocks", type=int, default=30, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=20, help="steps a block")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "agreement.json")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.as_rank:
        return as_rank(chosen.blocks, chosen.steps, chosen.out)
    rows = [row for ranks in chosen.ranks for row in measure(ranks, chosen.blocks, chosen.steps)]
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(as_text(report(rows)))
    for row in rows:
        low, high = row["added_ci95"]
        print(
            f"{row['name']:20s} {row['shape']:8s} bare {row['bare_ms']:.3f} ms watched {row['watched_ms']:.3f} ms "
            f"added {row['added_ms']:.3f} ms [{low:.3f}, {high:.3f}] calls {row['call_ms']:.3f} ms "
            f"(99 %: {row['call_ms_p99']:.3f}) bar {row['bar']}{' MISSED' if row['pass'] is False else ''}"
        )
    return 0 if all(row["pass"] is not False for row in rows) else 1


def measure(ranks: int, blocks: int, steps: int) -> list[dict[str, Any]]:
    """One launch; returns rank 0's times."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    out = Path(tempfile.mkdtemp()) / "times.json"
    environment = {
        **os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    arguments = ["--as-rank", "--blocks", str(blocks), "--steps", str(steps), "--out", str(out)]
    processes = [
        subprocess.Popen([sys.executable, __file__, *arguments], env={**environment, "RANK": str(rank)})
        for rank in range(ranks)
    ]
    codes = [process.wait(600) for process in processes]
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")
    times = json.loads(out.read_text())
    return [summary(kind, ranks, **times[kind]) for kind in KINDS]


def as_rank(blocks: int, steps: int, out: Path) -> int:
    """The part of one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    identity = Identity(run="bench", rank=rank, world_size=ranks, host="here")
    agreement = join(identity, Settings(), attempt=0, acts=True, policy="bench").agreement
    assert isinstance(agreement, AllRanks), agreement.unavailable
    weight, gradient = torch.randn(256, 256), torch.randn(256 * 1024)
    boundary = 0
    calls: list[float] = []

    def block(kind: str | None) -> float:
        """Milliseconds per step."""
        nonlocal boundary
        dist.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            for _ in range(4):
                weight @ weight
            dist.all_reduce(gradient)
            gradient.div_(ranks)
            if kind is not None:
                called = time.perf_counter()
                if kind == KINDS[1]:
                    agreement.any_bad(False, may_act=True)
                boundary += 1
                agreement.settle(boundary)
                agreement.due([], boundary)
                calls.append((time.perf_counter() - called) * 1000)
        return (time.perf_counter() - started) * 1000 / steps

    times: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        block(kind), block(None)
        calls.clear()
        pairs: list[tuple[float, float]] = []
        for number in range(blocks):
            if number % 2:
                watched, bare = block(kind), block(None)
            else:
                bare, watched = block(None), block(kind)
            pairs.append((bare, watched))
        times[kind] = {"pairs": pairs, "calls": list(calls)}
    agreement.leave(boundary)
    agreement.close()
    if rank == 0:
        out.write_text(json.dumps(times))
    dist.barrier()
    return 0


def summary(kind: str, ranks: int, pairs: list[tuple[float, float]], calls: list[float]) -> dict[str, Any]:
    bar = BARS_MS[kind]
    ratios = [watched / bare for bare, watched in pairs]
    added = [watched - bare for bare, watched in pairs]
    return {
        "name": kind,
        "shape": f"{ranks} ranks",
        "bare_ms": statistics.median(bare for bare, _ in pairs),
        "watched_ms": statistics.median(watched for _, watched in pairs),
        "ratio": statistics.median(ratios),
        "ci95": interval(ratios),
        "added_ms": statistics.median(added),
        "added_ci95": interval(added),
        "call_ms": statistics.median(calls),
        "call_ms_p99": sorted(calls)[int(0.99 * len(calls))],
        "bar": bar,
        "pass": None if bar is None else statistics.median(calls) < bar,
        "samples": [[round(value, 4) for value in pair] for pair in pairs],
    }


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return head(torch=torch.__version__) | {"rows": rows}


if __name__ == "__main__":
    sys.exit(main())
