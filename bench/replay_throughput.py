#!/usr/bin/env python3
"""How fast `fp8watch replay` is on one core, and how much memory it uses.

    python bench/replay_throughput.py [--steps N ...] [--frames N] [--tensors N]
    python bench/replay_throughput.py --ten-million [--log csv|jsonl]       (about seven minutes of a core)

Scalar logs: a CSV (or JSON lines) of step, loss, gradient norm and learning rate, with noise, a falling trend, a spike
every 50,000 steps and a gradient burst every 7,000. Frames: a store of delayed-scaling frames, amax and scale of every
tensor in every step and element counts in one of ten, as a GPU run records them. The command line replays each in a
separate process, whose CPU seconds and largest resident set are measured, start-up included.
Writes bench/results/replay.json; the row of `--ten-million` is added to those that are there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import detection_result
import numpy as np
from result_head import as_text

from fp8watch import columns
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.records import Hello, Layout, RunRecord, StepFrame, TensorColumn

OUT = Path(__file__).parent / "results" / "replay.json"
STEPS_BAR, FRAMES_BAR = 20_000.0, 200.0
MEMORY_BAR_MIB = 300.0
"""Limit for a scalar log, however long it is."""
TEN_MILLION = 10_000_000
SPIKE_EVERY, BURST_EVERY = 50_000, 7_000
TENSORS_OF_A_LAYER = ("input", "weight", "grad_output")


CSV_ROW = "{},{:.5f},{:.5f},{:.4e}\n"
JSON_ROW = '{{"step": {}, "loss": {:.5f}, "grad_norm": {:.5f}, "lr": {:.4e}}}\n'


def write_log(path: Path, num_steps: int) -> None:
    """A log of this many steps, CSV or JSON lines by its name, written in blocks."""
    rng = np.random.default_rng(0)
    is_csv = path.suffix == ".csv"
    row = (CSV_ROW if is_csv else JSON_ROW).format
    with path.open("w") as out:
        out.write("step,loss,grad_norm,lr\n" if is_csv else "")
        for first in range(0, num_steps, 100_000):
            steps = np.arange(first + 1, min(num_steps, first + 100_000) + 1)
            loss = (2.0 + 8.0 / np.sqrt(1 + steps / 1000)) * (1 + 0.01 * rng.standard_normal(len(steps)))
            loss *= np.where(steps % SPIKE_EVERY < 8, 1.4, 1.0)
            norm = 0.5 * np.exp(0.15 * rng.standard_normal(len(steps))) * np.where(steps % BURST_EVERY == 0, 8.0, 1.0)
            rate = 3e-4 * np.minimum(1.0, steps / 2000)
            rows = zip(steps.tolist(), loss.tolist(), norm.tolist(), rate.tolist(), strict=True)
            out.writelines(row(*values) for values in rows)


def make_frames(num_frames: int, num_tensors: int) -> tuple[Layout, Iterator[StepFrame]]:
    """Healthy delayed scaling: amax moves by 10 % per step, the scale is the one that a window of 16 demands."""
    names = [(f"blocks.{i // 12}.linear{i // 3 % 4}", TENSORS_OF_A_LAYER[i % 3]) for i in range(num_tensors)]
    described = [
        TensorColumn(
            module=module, tensor=tensor, block=module.split(".")[1],  # type: ignore[arg-type]
            fp8_format="e5m2" if tensor.startswith("grad") else "e4m3", history_len=16,
        )
        for module, tensor in names
    ]  # fmt: skip
    layout = Layout(
        run="frames", attempt=0, rank=0, layout_id=1, columns=described, expected_modules=num_tensors // 3,
        observed_modules=num_tensors // 3,
    )  # fmt: skip
    return layout, _frames(num_frames, described)


def _frames(num_frames: int, described: list[TensorColumn]) -> Iterator[StepFrame]:
    rng = np.random.default_rng(0)
    size = len(described)
    top = np.array([57344.0 if column.fp8_format == "e5m2" else 448.0 for column in described])
    level = np.exp(rng.standard_normal(size))
    window = np.zeros((16, size), np.float32)
    scale = np.ones(size, np.float32)
    for step in range(1, num_frames + 1):
        amax = (level * np.exp(0.1 * rng.standard_normal(size))).astype(np.float32)
        held = {"amax": columns.pack(amax, "f4"), "scale": columns.pack(scale, "f4")}
        if step % 10 == 0:
            quantized = np.full(size, 4_194_304, np.uint64)
            held["quantized"] = columns.pack(quantized, "u8")
            held["saturated"] = columns.pack(np.zeros(size, np.uint64), "u8")
            held["underflowed"] = columns.pack(rng.integers(100, 200, size).astype(np.uint64), "u8")
            held["snr"] = columns.pack((31 + 0.1 * rng.standard_normal(size)).astype(np.float32), "f4")
        loss = 3.0 + 0.03 * rng.standard_normal()
        scalars = {"loss": loss, "grad_norm": math.exp(0.1 * rng.standard_normal()), "learning_rate": 3e-4}
        yield StepFrame(
            run="frames", attempt=0, rank=0, step=step, layout_id=1, time_unix=0.0, scalars=scalars, columns=held
        )
        window[step % 16] = amax
        scale = (top / window.max(axis=0)).astype(np.float32)


def write_store(path: Path, num_frames: int, num_tensors: int) -> None:
    """A store as the embedded process leaves it."""
    layout, frames = make_frames(num_frames, num_tensors)
    hello = Hello(
        wire_version=1, run="frames", attempt=0, rank=0, local_rank=0, world_size=1, pid=1, host="here", time_unix=0.0,
        step=0,
    )  # fmt: skip
    record = RunRecord(run="frames", state="ended", hello=hello, started_unix=0.0, updated_unix=0.0)
    with contextlib.closing(SqliteStore(path)) as store:
        store.append("frames", [record, layout])
        for frame in frames:
            store.append("frames", [frame])


def replayed(path: Path) -> dict[str, Any]:
    """CPU seconds, wall seconds, largest resident set and findings of one replay by the command line."""
    program_path = Path(sys.executable).with_name("fp8watch")
    command = [str(program_path), "replay", "--format", "jsonl", str(path)]
    program = (
        "import json,resource,subprocess,sys;"
        "done=subprocess.run(sys.argv[1:],stdout=subprocess.PIPE,text=True);"
        "used=resource.getrusage(resource.RUSAGE_CHILDREN);"
        "print(json.dumps([done.returncode,used.ru_utime+used.ru_stime,used.ru_maxrss/1024,done.stdout.count(chr(10))]))"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, *command], stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    code, cpu, peak, lines = json.loads(done.stdout)
    if code:
        raise RuntimeError(f"replay of {path} ended with {code}")
    wall = time.monotonic() - started
    return {"cpu_seconds": round(cpu, 2), "wall_seconds": round(wall, 2), "peak_mib": round(peak, 1), "lines": lines}


def beside(path: Path, head: dict[str, Any], rows: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The file's own head and rows together with these; each row says where it comes from."""
    known = json.loads(path.read_text()) if path.exists() else head | {"rows": []}
    own = [row | {"measured": head} for row in rows]
    shapes = {row["shape"] for row in own}
    kept = [row for row in known.pop("rows") if row["shape"] not in shapes]
    return known, [*kept, *own]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, action="append", help="length of a scalar log (1000000)")
    parser.add_argument("--frames", type=int, default=1000)
    parser.add_argument("--tensors", type=int, default=1680)
    parser.add_argument("--ten-million", action="store_true", help="one log of 10,000,000 steps, and nothing else")
    parser.add_argument("--log", choices=("csv", "jsonl"), default="csv", help="kind of the scalar logs")
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args()
    command = " ".join(["bench/replay_throughput.py", *sys.argv[1:]])
    head = detection_result.header(command)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="fp8watch-replay-") as folder:
        for num_steps in [TEN_MILLION] if chosen.ten_million else chosen.steps or [1_000_000]:
            log = Path(folder, f"{num_steps}.{chosen.log}")
            write_log(log, num_steps)
            size = log.stat().st_size
            seen = replayed(log)
            log.unlink()
            rate = num_steps / seen["cpu_seconds"]
            passed = rate >= STEPS_BAR and seen["peak_mib"] <= MEMORY_BAR_MIB
            rows.append(
                {"name": "scalar log", "shape": f"{num_steps} steps, {chosen.log}", "megabytes": round(size / 1e6, 1),
                 "steps_per_cpu_second": round(rate), **seen,
                 "bar": {"steps_per_cpu_second": STEPS_BAR, "peak_mib": MEMORY_BAR_MIB}, "pass": passed}
            )  # fmt: skip
            print(rows[-1], flush=True)
        if chosen.frames and not chosen.ten_million:
            store = Path(folder, "frames.sqlite")
            write_store(store, chosen.frames, chosen.tensors)
            seen = replayed(store)
            rate = chosen.frames / seen["cpu_seconds"]
            rows.append(
                {"name": "frames", "shape": f"{chosen.frames} frames of {chosen.tensors} tensors",
                 "frames_per_cpu_second": round(rate, 1), **seen, "bar": {"frames_per_cpu_second": FRAMES_BAR},
                 "pass": rate >= FRAMES_BAR}
            )  # fmt: skip
            print(rows[-1], flush=True)
    if chosen.ten_million:
        head, rows = beside(chosen.out, head, rows)
    chosen.out.write_text(as_text(head | {"rows": rows}))
    return 0 if all(row["pass"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
