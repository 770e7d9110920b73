"""How long a rollback takes, checksums included, compared with plain `torch.load` and `load_state_dict`.

    python bench/rollback.py [--gib 1.0] [--rounds 11] [--out FILE]

Model and AdamW state together have the given size. Both ways read the same tensors from files of the same size, in
turn, in one process. Ours also compares every file with its checksum, every tensor with the live one, and the
parameters' checksum afterwards, and restores random state and data position. The bar is on the ratio of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from result_head import as_text, head, interval
from torch import nn

from fp8watch.checkpoints import Checkpoints
from fp8watch.checkpoints.manager import CheckpointManager
from fp8watch.checkpoints.parts import TrainingParts

BAR = 1.5
WIDTH = 2048


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="model and optimizer together")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "rollback.json")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    layers = max(1, round(chosen.gib * 2**30 / (3 * 4 * WIDTH * WIDTH)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        row = measure(model, optimizer, Path(folder), chosen.rounds)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(as_text(report([row])))
    low, high = row["ci95"]
    print(
        f"{row['name']} {row['shape']}: plain {row['bare_ms']:.0f} ms, rollback {row['watched_ms']:.0f} ms, "
        f"ratio {row['ratio']:.2f} [{low:.2f}, {high:.2f}], bar {BAR}{'' if row['pass'] else ' MISSED'}"
    )
    return 0 if row["pass"] else 1


def measure(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, rounds: int) -> dict[str, Any]:
    parts = TrainingParts(model=model, optimizer=optimizer)
    manager = CheckpointManager(Checkpoints(folder / "ours"), parts, run="bench", attempt=lambda: 0)
    name = manager.save(1).checkpoint
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "plain.pt")

    def plain() -> float:
        started = time.perf_counter()
        state = torch.load(folder / "plain.pt", map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return (time.perf_counter() - started) * 1000

    def ours() -> float:
        started = time.perf_counter()
        manager.restore(name, allow_without_data=True, is_quick=True)
        return (time.perf_counter() - started) * 1000

    plain(), ours()  # from here on both files are in the page cache
    pairs = []
    for number in range(rounds):
        if number % 2:
            mine, theirs = ours(), plain()
        else:
            theirs, mine = plain(), ours()
        pairs.append((theirs, mine))
    ratios = [mine / theirs for theirs, mine in pairs]
    ratio = statistics.median(ratios)
    size = (folder / "plain.pt").stat().st_size
    return {
        "name": "rollback", "shape": f"{size / 2**30:.2f} GiB",
        "bare_ms": statistics.median(theirs for theirs, _ in pairs),
        "watched_ms": statistics.median(mine for _, mine in pairs),
        "ratio": ratio, "ci95": interval(ratios), "bar": BAR, "pass": ratio <= BAR,
        "samples": [[round(value, 1) for value in pair] for pair in pairs],
    }  # fmt: skip


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return head(torch=torch.__version__) | {"rows": rows}


if __name__ == "__main__":
    sys.exit(main())
