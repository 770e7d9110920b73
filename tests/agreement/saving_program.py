"""One rank of a job that saves, goes back and resumes: plays the scenarios named, and writes down what held.

`python saving_program.py OUT SCENARIO...` under torchrun's variables. `OUT/SCENARIO-RANK.jsonl` has a line a step and
a last one that says how it ended; checkpoints lie in `OUT/saved/SCENARIO`. `resume:NAME` goes on with what NAME saved.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fp8watch
from fp8watch.checkpoints import underway
from fp8watch.checkpoints.checksum import parameter_checksum
from fp8watch.checkpoints.manager import CheckpointManager
from fp8watch.checkpoints.restore import PartlyRestored
from fp8watch.emulation import DelayedScaling, convert
from fp8watch.errors import ActionError, CheckpointError

ACTS = "{version: 1, mode: auto, rules: [{name: n, when: {detector: nonfinite}, ladder: [{action: halt}]}]}"
EVERY, BATCH, SAMPLES = 5, 4, 512
STEPS = {"ddp-preempted": 20}
RESTARTS = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
"""How often torchrun has started all ranks anew."""


class Net(nn.Module):
    def __init__(self, *, dropout: float) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)
        self.drop = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        out: torch.Tensor = self.down(self.drop(self.act(self.up(inputs))))
        return out


class Owned(torch.optim.Optimizer):
    """Each rank keeps the momentum of its parameters only, steps with these and sends them round, as distributed Muon
    does: under DistributedDataParallel, with optimizer state that differs from rank to rank."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                owner = index % dist.get_world_size()
                if owner == dist.get_rank():
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    parameter.sub_(momentum.mul_(0.9).add_(parameter.grad), alpha=group["lr"])
                dist.broadcast(parameter, src=owner)


class Job:
    def __init__(self, scenario: str, out: Path) -> None:
        self.scenario, self.out = scenario, out
        self.name = scenario.removeprefix("resume:")
        self.kind = self.name.partition("-")[0]
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.file = (out / f"{scenario.replace(':', '-')}{'-again' * RESTARTS}-{self.rank}.jsonl").open(
            "w", buffering=1
        )
        torch.manual_seed(self.rank if self.kind == "hand" else 0)
        self.inner = Net(dropout=0.0 if self.kind == "tp" else 0.2)
        self.model = self.wrap(self.inner)
        make = Owned if self.kind == "owned" else torch.optim.AdamW
        self.optimizer: torch.optim.Optimizer = make(self.model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=20)
        inputs = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(1))
        data = TensorDataset(inputs, torch.arange(SAMPLES))
        sampler: Any = (
            DistributedSampler(data, num_replicas=1, rank=0) if self.kind == "tp" else DistributedSampler(data)
        )
        self.loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
        torch.manual_seed(100 + (0 if self.kind == "tp" else self.rank))  # each rank has random numbers of its own
        folder = out / "saved" / self.name
        self.watch = fp8watch.attach(
            self.model, self.optimizer, lr_scheduler=scheduler, dataloader=self.loader, policy=ACTS, run=self.name,
            checkpoints=fp8watch.Checkpoints(folder, every=EVERY, keep=20, **self.storage(folder)),
        )  # fmt: skip
        self.manager: CheckpointManager = self.watch._session.context.checkpoints
        self.scheduler = scheduler
        self.hurt()

    def wrap(self, inner: Net) -> nn.Module:
        if self.kind == "hand":  # split up without anything that knows: experts, tensor parallel made by hand
            return inner
        if self.kind in ("fsdp", "dcp"):
            from torch.distributed.device_mesh import init_device_mesh  # a second to load, which few need
            from torch.distributed.fsdp import fully_shard

            fully_shard(inner, mesh=init_device_mesh("cpu", (self.ranks,)))
            return inner
        if self.kind == "tp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

            mesh = init_device_mesh("cpu", (self.ranks,))
            return parallelize_module(inner, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        convert(inner, DelayedScaling(amax_history_len=4))
        # Else it forms other buckets after its first step, in which sums are taken in another order.
        return DistributedDataParallel(inner, find_unused_parameters=self.name == "ddp-preempted")

    def storage(self, folder: Path) -> dict[str, Any]:
        if self.kind in ("dcp", "hand"):
            return {"format": "dcp", "background": "background" in self.name}
        if self.kind != "callback":
            return {}

        def save(target: Path) -> None:
            torch.save([p.detach() for p in self.inner.parameters()], target / f"mine-{self.rank}.pt")
            torch.save(self.optimizer.state_dict(), target / f"moments-{self.rank}.pt")

        def load(target: Path) -> None:
            with torch.no_grad():
                for live, saved in zip(
                    self.inner.parameters(), torch.load(target / f"mine-{self.rank}.pt"), strict=True
                ):
                    live.copy_(saved)
            self.optimizer.load_state_dict(torch.load(target / f"moments-{self.rank}.pt"))

        return {"save": save, "load": load}

    def hurt(self) -> None:
        """What goes wrong in this scenario, on one rank."""
        if self.scenario.startswith("resume:"):
            return
        if "begin" in self.name and self.rank == 1:
            make_folder = Path.mkdir

            def mkdir(path: Path, *arguments: Any, **named: Any) -> None:
                is_due = path.name == f".unfinished-step-{2 * EVERY:08d}-attempt-0.ranks"
                if is_due and path.parent == self.manager.root:
                    raise OSError(errno.ENOSPC, "No space left on device")
                make_folder(path, *arguments, **named)

            Path.mkdir = mkdir  # type: ignore[assignment]
        if "halfway" in self.name and self.rank == 1:

            def fail(*arguments: Any, **named: Any) -> None:
                raise PartlyRestored("the device is gone")

            self.manager.put_back = fail  # type: ignore[method-assign]
        if "change" in self.name and self.rank == 2:

            def refuse(step: int, params: dict[str, Any]) -> Any:
                raise ActionError("no room for it")

            self.watch._session.actions["hold_lr"].apply = refuse  # type: ignore[method-assign]
        is_terminated = "sigterm" in self.name and self.rank == self.ranks - 1
        if is_terminated or (self.name == "ddp-preempted" and RESTARTS == 0):
            self.manager.put_back = lambda *a, **k: os.kill(os.getpid(), signal.SIGTERM)  # type: ignore[assignment]
        if "full" in self.name and self.rank == 1:
            real = underway.write_files

            def write(folder: Path, files: dict[str, Any], common: Any = None) -> Any:
                is_due = any(f"step-{step:08d}" in folder.name for step in (2 * EVERY, 3 * EVERY + 1))
                if is_due and folder.parent == self.manager.root:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return real(folder, files, common)

            underway.write_files = write

    def damage(self, step: int) -> None:
        """Shards that rot on the disk, right before the rollback comes."""
        if (step, self.watch.attempt, self.rank) != (12, 0, 0) or self.scenario.startswith("resume:"):
            return
        if not any(word in self.name for word in ("truncated", "flipped", "missing")):
            return
        folder = self.out / "saved" / self.name / f"step-{2 * EVERY:08d}-attempt-0"
        deadline = time.monotonic() + 30
        while not folder.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        name = "model-00002.pt" if self.kind == "fsdp" else "state-00002.pt"
        if "truncated" in self.name:
            data = (folder / name).read_bytes()
            (folder / name).write_bytes(data[:-7])
        elif "flipped" in self.name:
            data = bytearray((folder / name).read_bytes())
            data[len(data) // 2] ^= 4
            (folder / name).write_bytes(data)
        elif "missing" in self.name:
            (folder / name).unlink()

    def train(self, steps: int) -> None:
        ended = "end"
        try:
            self.say(resumed=self.watch.resume(), attempt=self.watch.attempt)
            batches = self.watch.batches(self.loader)
            while self.watch.global_step < steps:
                for inputs, ids in batches:
                    if self.watch.global_step >= steps:
                        break
                    self.step(inputs, ids)
        except SystemExit as error:
            ended = f"{type(error).__name__} {error.code}"
        except CheckpointError as error:
            ended = f"CheckpointError: {error}"
        self.watch.detach()
        if "sigterm" in self.name:
            ended = f"{ended} after it"
        self.say(ended=ended, step=self.watch.global_step, failures=self.watch.failures)
        self.file.close()

    def step(self, inputs: torch.Tensor, ids: torch.Tensor) -> None:
        time.sleep(0.01 if self.rank == 2 else 0.002)
        step, attempt = self.watch.global_step + 1, self.watch.attempt
        self.damage(step)
        if self.name == "disarm" and step == 10:
            if self.rank == 0:
                subprocess.run([Path(sys.executable).with_name("fp8watch"), "disarm", "--all"], check=True)
            dist.barrier()
        loss = (self.model(inputs) - inputs).square().mean()
        loss.backward()
        norm = self.watch.clip_grad_norm_(self.model.parameters(), max_norm=0.5)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        limit = self.watch._session.context.clip.last.limit
        self.say(
            step=step, attempt=attempt, loss=loss.item(), norm=float(whole), ids=ids.tolist(), limit=limit,
            drawn=torch.rand(()).item(), checksum=parameter_checksum(self.inner), lr=self.scheduler.get_last_lr(),
            used=[float(lr) for lr in self.watch._session.context.lr.effective],
        )  # fmt: skip
        self.watch.step(loss)

    def say(self, **line: Any) -> None:
        self.file.write(json.dumps(line) + "\n")


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in a process that torchrun did not fork from itself
    dist.init_process_group("gloo")
    for name in names:
        job = Job(name, out)
        job.train(40 if name.startswith("resume:") else STEPS.get(name, 30))
        if "sigterm" in name and not name.startswith("resume:"):
            os._exit(0)  # a rank is missing, and torch's own group would wait for it
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
