"""Cost of watching on a GPU: blocks of steps of two equal trainings, bare and watched, alternating in one process.

    python bench/capture.py [--shape gpu-bound|launch-bound|torchao|many-tensors|all] [--kind ROW...] [--pairs N]
                            [--append] [--out FILE]

Needs Transformer Engine (torchao for that shape). Every block is timed by the wall clock between two synchronisations,
so both host and device time count. The ratio is watched over bare of neighbouring blocks; its median (a mean of
medians where few blocks hold a sampled step, `typical` of `capture_blocks`) and a bootstrap 95 % interval are reported,
with the ratio of the means and the raw block times. The two trainings change roles halfway. A standing agent takes the
frames, as on a node. There are two kinds of watched blocks: with every amax and scale in every step, and with element
counts of every cast in one step of ten as well. A logging step is also compared with one of Transformer Engine's own
debug features, each step timed alone. CPU time is that of the training thread inside fp8watch, measured separately.

Rows that are not run stay in the result file; each row names its code and command. `--append` adds blocks to those of
the same row and code instead of replacing them, and the row says how many each run gave: decide on their number before
you look, because a bar is met by chance if blocks are added until it is. On one H200 allow 280 s for the GPU-bound
shape, 700 s for the launch-bound one, 120 s for torchao, a minute for many tensors.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from capture_blocks import Times, alternate, block, ratio_of, typical
from capture_cost import measure_cpu
from capture_training import SHAPES, Torchao, Training, TransformerEngine
from result_head import as_text, commit

BARS = {
    "gpu-bound": 1.005, "gpu-bound statistics": 1.02, "launch-bound": 1.02, "launch-bound statistics": 1.02,
    "torchao": 1.01,
}  # fmt: skip
PLANS: dict[str, dict[str, int]] = {
    "gpu-bound": {"steps": 5, "lead": 1, "pairs": 20},
    "gpu-bound statistics": {"steps": 5, "lead": 0, "group": 2, "pairs": 16},
    "launch-bound": {"steps": 2, "lead": 1, "pairs": 200},
    "launch-bound statistics": {"steps": 2, "lead": 1, "group": 10, "pairs": 100},
    "torchao": {"pairs": 15},
}
"""See `capture_blocks.alternate`. The launch-bound shape is the noisy one, and its steps are short. What a step leaves
for the transport thread counts there, too: that thread takes the interpreter from training. Ten of its blocks are 30
watched steps, which hold each kind of periodic work equally often."""
SAMPLE_EVERY = 10
"""Timed steps."""
MOST_CPU_US = 400.0
LEAST_CHEAPER = 20.0
AGENT_SECONDS = 30.0
MOST_BYTES = 64 * 1024**2
STEPS_COMPILED = 10
"""Steps per block of the torchao shape."""
EVERY = {"statistics_every": 1_000_000, "what_if_every": 0, "shadow_every": 0}
SAMPLED = {"statistics_every": SAMPLE_EVERY, "what_if_every": 0, "shadow_every": 0, "overhead_budget": 1.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=[*SHAPES, "torchao", "all"], default=["all"])
    parser.add_argument("--pairs", type=int, help="groups of blocks of each kind (default: depends on its noise)")
    parser.add_argument("--kind", nargs="+", choices=PLANS, default=[*PLANS], help="ratios to measure (default: all)")
    parser.add_argument("--append", action="store_true", help="add to the blocks of the same rows and code")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "capture_h200.json")
    chosen = parser.parse_args()
    names = [*SHAPES, "torchao"] if "all" in chosen.shape else chosen.shape
    rows: list[dict[str, Any]] = []
    with agent():
        for name in names:
            started = time.perf_counter()
            for found in measure(name, chosen.pairs, chosen.kind):
                row = pooled(found, chosen.out) if chosen.append else found
                rows.append(row)
                print(f"{describe(row)} ({time.perf_counter() - started:.0f} s)", flush=True)
                write(chosen.out, rows, " ".join(["python", *sys.argv]))  # so that nothing measured is lost
    return 0 if all(row["pass"] for row in rows) else 1


@contextmanager
def agent() -> Iterator[None]:
    """A node's agent in its own process, once it listens. Raises `RuntimeError` if it ends or takes too long."""
    folder = Path(tempfile.mkdtemp())
    socket, log = folder / "agent.sock", folder / "agent.log"
    os.environ |= {
        "FP8WATCH_DIR": str(folder / "runs"), "FP8WATCH_AGENT": f"unix://{socket}", "FP8WATCH_METRICS_PORT": "0",
        "FP8WATCH_REPORT": "0",
    }  # fmt: skip
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "fp8watch_agent", "--socket", str(socket)], stdout=out, stderr=out
        )  # fmt: skip
    try:
        deadline = time.monotonic() + AGENT_SECONDS
        while not socket.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no agent takes the frames: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait()


def attach(training: Training, run: str, options: dict[str, Any]) -> Any:
    """A watch with the settings of this measurement."""
    import fp8watch
    from fp8watch.settings import from_environment

    return fp8watch.attach(
        training.model, training.optimizer, run=run, settings=from_environment().model_copy(update=options)
    )  # fmt: skip


def measure(name: str, pairs: int | None, kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of one shape, each as soon as it is measured. `kinds`: which ratios."""
    if name == "many-tensors":
        yield memory_row()
        return
    if name == "torchao":
        yield torchao_row(pairs or PLANS[name]["pairs"])
        return
    trainings = (TransformerEngine(**SHAPES[name]), TransformerEngine(**SHAPES[name]))
    for training in trainings:
        for _ in range(8):
            training.step(None)
    training = trainings[0]
    shape = "x".join(str(value) for value in SHAPES[name].values())
    for options in (EVERY, SAMPLED):  # warm up: compiles kernels and allocates memory
        watch = attach(training, f"{name}-warm", options)
        for _ in range(4):
            training.step(watch)
        watch.detach()
    if name == "launch-bound":
        yield cpu_row(training, shape)
    for kind, options in ((name, EVERY), (f"{name} statistics", SAMPLED)):
        if kind not in kinds:
            continue
        plan = PLANS[kind] | ({"pairs": pairs} if pairs else {})
        if options is SAMPLED:  # of the timed steps, and untimed ones come between them
            options = options | {"statistics_every": SAMPLE_EVERY * (plan["lead"] + plan["steps"]) // plan["steps"]}
        times = alternate(trainings, partial(attach, run=kind.replace(" ", "-"), options=options), **plan)
        found = row(kind, shape, times, plan.get("group", 1))
        if kind.endswith("statistics"):
            found["host_syncs"] = host_syncs(training, attach(training, f"{name}-syncs", SAMPLED))
        yield found
    alone = step_times(training, attach(training, f"{name}-alone", SAMPLED), 32)
    del training, trainings
    gc.collect()
    torch.cuda.empty_cache()
    yield against_te(name, shape, alone)


def cpu_row(training: Training, shape: str) -> dict[str, Any]:
    """CPU time of the training thread inside fp8watch per step."""
    # Its steps wait for the host: the device's queue never fills, so no synchronisation is needed.
    found = measure_cpu(training, attach(training, "cpu", EVERY), lambda: None)
    return {
        "name": "training thread", "shape": shape, **found, "bar": MOST_CPU_US, "pass": found["cpu_us"] <= MOST_CPU_US
    }  # fmt: skip


def row(name: str, shape: str, times: Times, group: int = 1) -> dict[str, Any]:
    """Milliseconds, ratio and interval of paired blocks."""
    ratio, (low, high) = ratio_of(times, group)
    return {
        "name": name, "shape": shape, "bare_ms": typical(times["bare"], group),
        "watched_ms": typical(times["watched"], group), "ratio": ratio, "ci95": [low, high],
        "ratio_of_means": statistics.fmean(times["watched"]) / statistics.fmean(times["bare"]),
        "bar": BARS[name], "pass": high <= BARS[name],
        "raw": {"ms": times, "blocks_a_group": group, "blocks_a_run": [len(times["bare"])]},
    }  # fmt: skip


def pooled(new: dict[str, Any], path: Path) -> dict[str, Any]:
    """The row with the blocks of an earlier run of the same code as well, if the file has one."""
    old = next((one for one in _rows(path) if one["name"] == new["name"] and one["code"] == _code()), None)
    if old is None or old["shape"] != new["shape"] or "blocks_a_group" not in new["raw"]:
        return new
    group = new["raw"]["blocks_a_group"]
    if old["raw"].get("blocks_a_group") != group:
        return new
    times = {kind: old["raw"]["ms"][kind] + blocks for kind, blocks in new["raw"]["ms"].items()}
    found = new | row(new["name"], new["shape"], times, group)
    found["raw"]["blocks_a_run"] = old["raw"]["blocks_a_run"] + new["raw"]["blocks_a_run"]
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    return found


def _code() -> str:
    return commit() or os.environ.get("FP8WATCH_BENCH_COMMIT", "unknown")


def host_syncs(training: Training, watch: Any) -> int:
    """Number of waits for the device in ten watched steps, one of them sampled, as torch reports them."""
    for _ in range(5):
        training.step(watch)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for _ in range(10):
            training.step(watch)
        torch.cuda.set_sync_debug_mode("default")
    watch.detach()
    return sum("called a synchronizing" in str(warning.message) for warning in said)


def step_times(training: Training, watch: Any, steps: int) -> dict[str, list[Any]]:
    """Milliseconds of each step, timed alone, and which steps were sampled."""
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        started = time.perf_counter()
        training.step(watch)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    watch.detach()
    return {"ms": times, "logged": [step % 10 == 0 for step in range(steps)]}


def against_te(name: str, shape: str, ours: dict[str, list[Any]]) -> dict[str, Any]:
    """Extra time of a logging step: ours, and that of Transformer Engine's debug features."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("capture_te_debug.py")), name, "22"],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    theirs = json.loads(done.stdout.splitlines()[-1])
    extra = [logging_extra(times) for times in (ours, theirs)]
    cheaper = extra[1] / extra[0]
    return {
        "name": f"{name} logging step", "shape": shape, "ours_extra_ms": extra[0], "te_debug_extra_ms": extra[1],
        "te_debug_mean_ratio": statistics.fmean(theirs["ms"][2:]) / plain(theirs), "ratio": cheaper,
        "bar": LEAST_CHEAPER, "pass": cheaper >= LEAST_CHEAPER, "raw": {"ours": ours, "te_debug": theirs},
    }  # fmt: skip


def plain(times: dict[str, list[Any]]) -> float:
    """Median of the steps without logging, except the first two."""
    return statistics.median(ms for ms, is_logged in list(zip(*times.values(), strict=True))[2:] if not is_logged)


def logging_extra(times: dict[str, list[Any]]) -> float:
    """Median of logging steps minus that of the others, in ms; at least 1 us."""
    logged = [ms for ms, is_logged in list(zip(*times.values(), strict=True))[2:] if is_logged]
    return max(statistics.median(logged) - plain(times), 1e-3)


def torchao_row(pairs: int) -> dict[str, Any]:
    """Two copies, one watched since before it was compiled, because a graph cannot be bare and watched in turn."""
    shape = {"layers": 6, "width": 4096, "batch": 8, "length": 2048}
    bare, watched = Torchao(**shape), Torchao(**shape)
    watch = attach(watched, "torchao", EVERY)
    for _ in range(6):
        bare.step(None)
        watched.step(watch)
    counters = dict(torch._dynamo.utils.counters["graph_break"])
    times: dict[str, list[float]] = {"bare": [], "watched": []}
    for pair in range(pairs):
        arms = [("bare", bare, None), ("watched", watched, watch)]
        for kind, training, its_watch in arms if pair % 2 == 0 else arms[::-1]:
            times[kind].append(block(training, its_watch, 1, STEPS_COMPILED))
    unseen = watch.not_observable
    watch.detach()
    found = row("torchao", "x".join(str(value) for value in shape.values()), times)
    is_whole = not counters and not unseen
    return found | {"graph_breaks": counters, "not_observable": unseen, "pass": found["pass"] and is_whole}


def memory_row() -> dict[str, Any]:
    """GPU memory that a watch takes for 1,680 tensors, sampled steps included."""
    gc.collect()  # another shape's trainings must not be freed meanwhile
    training = TransformerEngine(**SHAPES["many-tensors"])
    for _ in range(4):
        training.step(None)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    watch = attach(training, "memory", SAMPLED)
    for _ in range(14):
        training.step(watch)
    torch.cuda.synchronize()
    added = torch.cuda.memory_allocated() - before
    num_columns = len(watch._recorder.layout.columns)
    watch.detach()
    shape = "x".join(str(value) for value in SHAPES["many-tensors"].values())
    is_whole = num_columns >= 1680
    return {
        "name": "memory", "shape": shape, "columns": num_columns, "bytes": added, "bar": MOST_BYTES,
        "pass": 0 < added < MOST_BYTES and is_whole,
    }  # fmt: skip


def describe(row: dict[str, Any]) -> str:
    """One line of the table."""
    verdict = "ok" if row["pass"] else "MISSED"
    facts = {k: v for k, v in row.items() if isinstance(v, int | float) and k not in ("pass", "bar")}
    text = " ".join(f"{k} {v:.4g}" for k, v in facts.items())
    low_high = "[{:.4f}, {:.4f}]".format(*row["ci95"]) if "ci95" in row else ""
    return f"{row['name']:26s} {text} {low_high} bar {row['bar']:g} {verdict}"


def write(path: Path, rows: list[dict[str, Any]], command: str) -> None:
    """Write the result in the format of bench/README.md; rows of other shapes are kept."""
    import transformer_engine

    names = {row["name"] for row in rows}
    old = _rows(path)
    versions = {
        "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "transformer_engine": transformer_engine.__version__,
    }  # fmt: skip
    if "torchao" in sys.modules:
        versions["torchao"] = sys.modules["torchao"].__version__
    code = _code()
    rows = [{**row, "code": code, "command": command} for row in rows]
    report = {
        "commit": code,
        "date": datetime.date.today().isoformat(), "versions": versions, "machine": torch.cuda.get_device_name(),
        "command": command, "rows": [row for row in old if row["name"] not in names] + rows,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_text(report))


if __name__ == "__main__":
    sys.exit(main())
