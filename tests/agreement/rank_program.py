"""One rank of a job: trains a small FP8 model once for each scenario named, and writes down what held at each step.

`python rank_program.py OUT SCENARIO...` under torchrun's variables. `OUT/SCENARIO-RANK.jsonl` has a line a step, and
a last one that says how it ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fp8watch
from fp8watch.checkpoints.checksum import parameter_checksum
from fp8watch.emulation import DelayedScaling, convert
from fp8watch.emulation.linear import Fp8Linear
from fp8watch.settings import Settings

SKIPS = """
version: 1
mode: auto
rules:
  - name: non-finite
    when: {detector: nonfinite}
    ladder: [{action: skip_update, max_consecutive: 3}]
"""
ACTS = SKIPS.replace("skip_update, max_consecutive: 3", "halt")
MESHES = {"actions": {"dp": 2, "tp": 2}, "apart": {"tp": 2}, "stages": {"pp": 2}}
"""How attach is told that the model is cut up."""
HALVES = {"stages"}
"""Scenarios in which each of two ranks holds one pipeline stage."""
NOT_CLIPPED_FROM = 8
"""Step from which on the loop of a pipeline clips nothing itself."""
STEPS = {"actions": 78, "stages": 45, "embedded": 100, "killed": 400, "lost": 400}
LAST = {("unequal", 1): 23}
"""(scenario, rank) -> its last step, two before the others'."""


class Job:
    def __init__(self, name: str, out: Path) -> None:
        self.name, self.rank = name, dist.get_rank()
        self.norms: dict[str, float | None] = {}
        self.file = (out / f"{name}-{self.rank}.jsonl").open("w", buffering=1)
        self.is_alone = name in {"unequal", "bad-gradients", "lost", "apart", *HALVES}
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))
        # Ranks whose loops differ must not meet in a collective of the model's.
        convert(inner, DelayedScaling(amax_history_len=16, reduce_amax=not self.is_alone))
        if name in HALVES:
            inner = nn.Sequential(OrderedDict([(f"stage{self.rank}", inner[2 * self.rank]), ("act", nn.SiLU())]))
        self.inner = inner
        self.model: nn.Module = inner if self.is_alone else DistributedDataParallel(inner)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if name == "scaler" else None
        has_scheduler = name == "veto" and self.rank != 1
        scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=500) if has_scheduler else None
        dimensions = MESHES.get(name, {})
        mesh = (
            init_device_mesh("cpu", tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
            if dimensions
            else None
        )
        settings = Settings(agent=None) if name == "embedded" else Settings()
        policy = {"bad-gradients": SKIPS, "embedded": "auto"}.get(name, ACTS)
        self.watch = fp8watch.attach(
            self.model, self.optimizer, lr_scheduler=scheduler, scaler=self.scaler, policy=policy, run=name,
            settings=settings, mesh=mesh,
        )  # fmt: skip
        is_same = self.is_alone and name != "apart"
        self.generator = torch.Generator().manual_seed(7 + (0 if is_same else self.rank))

    def train(self) -> None:
        steps = LAST.get((self.name, self.rank), STEPS.get(self.name, 25))
        ended = "end"
        try:
            for step in range(1, steps + 1):
                self.step(step)
        except SystemExit as error:
            ended = f"{type(error).__name__} {error.code}"
        started = time.monotonic()
        self.watch.detach()
        self.say(ended=ended, step=self.watch.global_step, detach_seconds=time.monotonic() - started)
        self.file.close()

    def step(self, step: int) -> None:
        is_slow = (self.rank == 2 and self.name == "actions") or (self.name == "embedded" and step > 40)
        time.sleep(0.02 if is_slow else 0.004)
        if self.name == "embedded" and step == 30:
            while not self.watch._session.uplink._channel.is_connected:  # the agent takes seconds to start
                time.sleep(0.1)
        batch = torch.randn(8, 16, generator=self.generator)
        loss = self.pass_through_stages(batch) if self.name in HALVES else self.pass_through(batch)
        if self.name == "bad-gradients" and self.rank == 1 and step in (5, 6):
            self.layers()[0].weight.grad.fill_(float("nan"))
        if self.scaler is None:
            norm = None
            if self.name not in HALVES or step < NOT_CLIPPED_FROM:
                limit = 2.0 if self.name in HALVES else 10.0
                norm = float(self.watch.clip_grad_norm_(self.model.parameters(), max_norm=limit))
            self.optimizer.step()
            if self.name in HALVES:
                own = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in self.model.parameters()]))
                self.norms = {"norm": norm, "own_norm_after": own.item()}
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        if self.name == "embedded" and step >= 40:
            with torch.no_grad():
                for layer in self.layers():
                    layer.scaling_forward.scale.fill_(2.0**20)
        self.hold_of_step(step)
        self.watch.step(loss)

    def pass_through(self, batch: torch.Tensor) -> torch.Tensor:
        loss = (self.model(batch) ** 2).mean()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss

    def pass_through_stages(self, batch: torch.Tensor) -> torch.Tensor:
        """Forward from the first stage to the second, and the gradients back."""
        hidden = self.model(batch) if self.rank == 0 else torch.empty(8, 32, requires_grad=True)
        dist.broadcast(hidden.detach(), src=0)
        loss = torch.zeros(())
        if self.rank == 1:
            loss = 100.0 * (self.model(hidden) ** 2).mean()
            loss.backward()
        gradient = torch.empty_like(hidden) if hidden.grad is None else hidden.grad
        dist.broadcast(gradient, src=1)
        if self.rank == 0:
            hidden.backward(gradient)
        return loss

    def layers(self) -> list[Fp8Linear]:
        return [layer for layer in self.inner if isinstance(layer, Fp8Linear)]

    def hold_of_step(self, step: int) -> None:
        """What held during the update just made."""
        context = self.watch._session.context
        self.say(
            step=step,
            lr=[float(lr) for lr in context.lr.effective] or None,
            limit=None if context.clip.last is None else context.clip.last.limit,
            bf16=[layer.ran_high_precision for layer in self.layers()],
            scales=[layer.scaling_forward.scale.tolist() for layer in self.layers()],
            margin=self.layers()[0].recipe.margin,
            loss_scale=None if self.scaler is None else self.scaler.get_scale(),
            checksum=parameter_checksum(self.inner),
            skipped=int(context.skip.total),
            **self.norms,
        )

    def say(self, **line: Any) -> None:
        self.file.write(json.dumps(line) + "\n")


def die_before(job: Job, method: str) -> None:
    """Let this rank be killed when its boundary comes to `method`."""
    setattr(job.watch._boundary, method, lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in names:
        if name == "disarmed" and dist.get_rank() == 1:
            os.environ["FP8WATCH_DISARM"] = "1"
        job = Job(name, out)
        if job.rank == dist.get_world_size() - 1:
            if name == "killed":
                die_before(job, "_carry_out")
            elif name == "lost":
                die_before(job, "receive")
        job.train()
        os.environ.pop("FP8WATCH_DISARM", None)
        if name in ("killed", "lost"):
            os._exit(0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
