"""One rank of `agreement_stress.py`: trains each of the named sequences, and records what it held at each step.

`OUT/NAME-RANK.jsonl` has one line per step, and a last one with how it ended and what was decided.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from stress_arrivals import Arrivals
from stress_faults import hurt
from stress_saving import Durable
from stress_sequences import AGAIN, EVERY, STEPS, Sequence, draw
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fp8watch
from fp8watch.checkpoints.checksum import parameter_checksum
from fp8watch.emulation import DelayedScaling, convert
from fp8watch.records import Command, CommandResult

ACTS = "{version: 1, mode: auto, rules: [{name: n, when: {detector: nonfinite}, ladder: [{action: halt}]}]}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="+")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in chosen.names:
        with contextlib.suppress(SystemExit):
            _train(draw(name, dist.get_world_size()), chosen.out)
        dist.barrier()
    dist.destroy_process_group()
    return 0


def _train(sequence: Sequence, out: Path) -> None:
    rank = dist.get_rank()
    fault = sequence.faults.get(rank, "none")
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Dropout(0.2), nn.Linear(32, 16))
    convert(inner, DelayedScaling(amax_history_len=4))
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
    data = TensorDataset(torch.randn(256, 16, generator=torch.Generator().manual_seed(1)))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    torch.manual_seed(100 + rank)
    if fault == "disarmed":
        os.environ["FP8WATCH_DISARM"] = "1"
    folder = out / "saved" / sequence.name
    watch = fp8watch.attach(
        model, optimizer, lr_scheduler=scheduler, dataloader=loader, policy=ACTS, run=sequence.name,
        checkpoints=fp8watch.Checkpoints(folder, every=EVERY),
    )  # fmt: skip
    log = Log(watch, sequence, rank)
    durable = Durable(watch, is_by_clock=sequence.is_by_clock)
    hurt(watch, fault, sequence.name)
    ended = "end"
    with (out / f"{sequence.name}-{rank}.jsonl").open("w", buffering=1) as file:
        try:
            made = 0
            batches = watch.batches(loader)
            while made < STEPS:
                for (inputs,) in batches:
                    if made >= STEPS:
                        break
                    made += 1
                    log.arrivals.boundary = made
                    durable.finish()
                    if fault == "slow":
                        time.sleep(0.005)
                    loss = (model(inputs) - inputs).square().mean()
                    loss.backward()
                    watch.clip_grad_norm_(model.parameters(), max_norm=1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    found = parameter_checksum(inner)
                    line = {"step": watch.global_step + 1, "attempt": watch.attempt, "checksum": found}
                    file.write(json.dumps(line) + "\n")
                    watch.step(loss)
        except SystemExit as error:
            ended = f"{type(error).__name__} {error.code}"
        log.arrivals.finish()
        durable.let_go()
        watch.detach()
        file.write(json.dumps({"ended": ended, **log.content(folder)}) + "\n")
    os.environ.pop("FP8WATCH_DISARM", None)


class Log:
    """What reached this rank, what it carried out and what it answered, with the boundaries."""

    def __init__(self, watch: Any, sequence: Sequence, rank: int) -> None:
        self.arrivals = watch._session.uplink = Arrivals(watch._session.uplink, sequence, rank, watch._session.start)
        self._carried_out: list[tuple[str, str, int]] = []
        self._answers: list[list[Any]] = []
        boundary = watch._boundary
        conclude, answer, send = boundary._conclude, boundary._answer, boundary._send
        asked: list[Command] = []

        def concluding(command: Command, action: Any, did: Any, step: int) -> None:
            if did.outcome.name == "DONE":
                self._carried_out.append((command.id, command.verb, step))
            conclude(command, action, did, step)

        def answering(command: Command, *rest: Any, **more: Any) -> None:
            asked.append(command)
            answer(command, *rest, **more)
            asked.pop()

        def sending(result: CommandResult) -> None:
            # A repeated answer, to a command that was sent again, is to whatever has its id and verb.
            sequence = asked[-1].sequence if asked else AGAIN
            self._answers.append(
                [
                    self.arrivals.boundary, result.id, result.verb, result.attempt, sequence, result.step,
                    result.status, result.readback, result.detail,
                ]
            )  # fmt: skip
            send(result)

        boundary._conclude, boundary._answer, boundary._send = concluding, answering, sending

    def content(self, folder: Path) -> dict[str, Any]:
        """The content of the last line; paths without the part that differs each time."""
        arrivals = self.arrivals
        answers = [[*answer[:-1], answer[-1].replace(str(folder), "")] for answer in self._answers]
        return {
            "log": self._carried_out, "asked": arrivals.asked, "held": arrivals.held, "answers": answers,
            "problem": arrivals.problem,
        }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
