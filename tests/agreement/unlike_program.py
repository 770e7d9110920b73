"""One of two ranks in scenarios where something happens on one rank alone, at a place where ranks wait for each other.

`python unlike_program.py OUT SCENARIO...` under torchrun's variables. `OUT/SCENARIO-RANK.jsonl` has a line a step, and
a last one that says how it ended.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import fp8watch
from fp8watch.emulation import DelayedScaling, convert

HALTS = """
version: 1
mode: auto
rules:
  - name: non-finite
    when: {detector: nonfinite}
    ladder: [{action: halt}]
"""
SKIPS = HALTS.replace("{action: halt}", "{action: skip_update, max_consecutive: 3}")
STEPS = 24
CHANGED_AT = 5


class Job:
    def __init__(self, name: str, out: Path) -> None:
        self.name, self.rank = name, dist.get_rank()
        self.file = (out / f"{name}-{self.rank}.jsonl").open("w", buffering=1)
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        if name == "idle-expert":
            convert(inner, DelayedScaling(amax_history_len=4, reduce_amax=False))
        self.model: nn.Module = inner
        if name == "shards":
            fully_shard(inner)
        elif name in ("buckets", "buckets-alone"):
            self.model = DistributedDataParallel(inner, gradient_as_bucket_view=True)
        self.inner = inner
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)
        data = torch.randn(400, 16, generator=torch.Generator().manual_seed(1))
        loader = DataLoader(TensorDataset(data), batch_size=4)
        self.watch = fp8watch.attach(
            self.model, self.optimizer, run=name, policy=SKIPS if name == "shards" else HALTS,
            dataloader=loader if name == "change-raises" else None, forward=self.again,
            checkpoints=fp8watch.Checkpoints(out / f"checkpoints-{name}", every=4) if name == "change-raises" else None,
        )  # fmt: skip
        self.batches = iter(self.watch.batches(loader) if name == "change-raises" else loader)
        self.batch = torch.zeros(4, 16)
        if name == "change-raises" and self.rank == 0:
            self.watch._session.context.lr.add = self.explode_after(self.watch._session.context.lr.add)

    def explode_after(self, add: Callable[..., None]) -> Callable[..., None]:
        """A rule is in force already when it fails."""

        def fail(*args: Any) -> None:
            add(*args)
            self.explode()

        return fail

    @staticmethod
    def explode(*_: Any) -> None:
        raise RuntimeError("out of memory")

    def again(self) -> torch.Tensor:
        """What a recheck runs."""
        if self.name == "recheck-raises" and self.rank == 1:
            self.explode()
        return self.pass_through(self.batch + 1.0)

    def pass_through(self, batch: torch.Tensor) -> torch.Tensor:
        if self.name == "idle-expert" and self.rank == 1:
            return self.inner[0](batch).pow(2).mean()
        return self.model(batch).pow(2).mean()

    def train(self) -> None:
        ended = "end"
        try:
            for step in range(1, STEPS + 1):
                self.step(step)
        except SystemExit as error:
            ended = f"{type(error).__name__} {error.code}"
        self.watch.detach()
        self.say(ended=ended, failures=self.watch.failures)
        self.file.close()

    def step(self, step: int) -> None:
        (self.batch,) = next(self.batches)
        loss = self.pass_through(self.batch)
        loss.backward()
        if self.name == "shards":
            self.watch.clip_grad_norm_(self.model.parameters(), 1.0)
            if self.rank == 1 and step >= CHANGED_AT:
                weight: Any = self.inner[0].weight.grad
                weight.to_local().nan_to_num_()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self.name.startswith("buckets"))
        rules = len(self.watch._session.context.lr.rules)
        self.say(step=step, loss=loss.item(), rules=rules, attempt=self.watch.attempt)
        self.watch.step(loss)

    def say(self, **line: Any) -> None:
        self.file.write(json.dumps(line) + "\n")


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in names:
        Job(name, out).train()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
