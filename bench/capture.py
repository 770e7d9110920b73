"""What watching costs on a GPU: bare and watched blocks of steps of the same training, alternating in one process.

    python bench/capture.py [--shape gpu-bound|launch-bound|all] [--blocks 30] [--steps 10] [--out FILE]

Needs Transformer Engine. Every block is timed by the wall clock between two synchronisations, so both host and
device time count. The ratio is watched over bare of neighbouring blocks; its median and a bootstrap 95 % interval
are reported, the raw block times stand beside them. A standing agent takes the frames, as it would on a node.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

SHAPES = {
    "gpu-bound": {"layers": 12, "width": 4096, "batch": 8, "length": 2048, "heads": 32, "bar": 1.005},
    "launch-bound": {"layers": 16, "width": 2048, "batch": 8, "length": 1024, "heads": 16, "bar": 1.02},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="all")
    parser.add_argument("--blocks", type=int, default=30, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=10, help="steps a block")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "capture_h200.json")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    socket = folder / "agent.sock"
    os.environ |= {
        "FP8WATCH_DIR": str(folder / "runs"),
        "FP8WATCH_AGENT": f"unix://{socket}",
        "FP8WATCH_METRICS_PORT": "0",
    }
    agent = subprocess.Popen(
        [sys.executable, "-c", "from fp8watch_agent.cli import app; app()", "--socket", str(socket)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    names = list(SHAPES) if chosen.shape == "all" else [chosen.shape]
    try:
        rows = [measure(name, chosen.blocks, chosen.steps) for name in names]
    finally:
        agent.terminate()
        agent.wait()
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(report(rows), indent=1) + "\n")
    for row in rows:
        low, high = row["ci95"]
        print(
            f"{row['name']:14s} {row['shape']:24s} bare {row['bare_ms']:.2f} ms watched {row['watched_ms']:.2f} ms"
            f" ratio {row['ratio']:.4f} [{low:.4f}, {high:.4f}] bar {row['bar']} cpu {row['cpu_us_per_step']:.0f} us"
            f" {'ok' if row['pass'] else 'MISSED'}"
        )
    return 0 if all(row["pass"] for row in rows) else 1


class Training:
    """A stack of TE transformer layers in delayed scaling with AdamW."""

    def __init__(self, layers: int, width: int, batch: int, length: int, heads: int) -> None:
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import DelayedScaling, Format

        torch.manual_seed(0)
        self.te = te
        self.model = torch.nn.ModuleList(
            te.TransformerLayer(
                width, 4 * width, heads, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16,
                attn_input_format="bshd", self_attn_mask_type="causal",
            )
            for _ in range(layers)
        ).cuda()  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=1024, amax_compute_algo="max")
        self.x = torch.randn(batch, length, width, device="cuda", dtype=torch.bfloat16)

    def step(self, watch: Any | None) -> None:
        """One optimizer step, the loop of the README."""
        with self.te.autocast(enabled=True, recipe=self.recipe):
            hidden = self.x
            for layer in self.model:
                hidden = layer(hidden)
        loss = hidden.float().pow(2).mean()
        loss.backward()
        if watch is None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        else:
            watch.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if watch is not None:
            watch.step(loss)


def measure(name: str, blocks: int, steps: int) -> dict[str, Any]:
    """Alternate bare and watched blocks; which comes first changes from pair to pair."""
    import fp8watch

    shape = dict(SHAPES[name])
    bar = shape.pop("bar")
    training = Training(**shape)  # type: ignore[arg-type]
    for _ in range(8):
        training.step(None)
    times: dict[str, list[float]] = {"bare": [], "watched": []}
    cpu: dict[str, list[float]] = {"bare": [], "watched": []}
    memory = 0
    for pair in range(blocks):
        order = ("bare", "watched") if pair % 2 == 0 else ("watched", "bare")
        for kind in order:
            before = torch.cuda.memory_allocated()
            watched = kind == "watched"
            watch = fp8watch.attach(training.model, training.optimizer, run=f"{name}-{pair}") if watched else None
            for _ in range(3):
                training.step(watch)
            torch.cuda.synchronize()
            started, thread = time.perf_counter(), time.thread_time()
            for _ in range(steps):
                training.step(watch)
            cpu[kind].append((time.thread_time() - thread) / steps * 1e6)
            torch.cuda.synchronize()
            times[kind].append((time.perf_counter() - started) / steps * 1e3)
            if watch is not None:
                memory = max(memory, torch.cuda.memory_allocated() - before)
                watch.detach()
    ratios = [w / b for w, b in zip(times["watched"], times["bare"], strict=True)]
    low, high = bootstrap(ratios)
    del training
    torch.cuda.empty_cache()
    return {
        "name": name, "shape": "x".join(str(v) for v in shape.values()), "bare_ms": statistics.median(times["bare"]),
        "watched_ms": statistics.median(times["watched"]), "ratio": statistics.median(ratios), "ci95": [low, high],
        "bar": bar, "pass": high <= bar, "memory_bytes": memory,
        "cpu_us_per_step": statistics.median(cpu["watched"]) - statistics.median(cpu["bare"]),
        "raw": {"ms": times, "training_thread_cpu_us": cpu},
    }  # fmt: skip


def bootstrap(ratios: list[float], rounds: int = 4000) -> tuple[float, float]:
    """95 % interval of the median by resampling pairs."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(rounds))
    return medians[int(0.025 * rounds)], medians[int(0.975 * rounds)]


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The result in the format of bench/README.md."""
    import transformer_engine

    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "commit": commit or "unknown", "date": datetime.date.today().isoformat(),
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
            "transformer_engine": transformer_engine.__version__,
        },
        "machine": torch.cuda.get_device_name(), "command": "python bench/capture.py", "rows": rows,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
