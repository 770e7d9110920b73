"""One rank of a job on two nodes that torchrun starts again and again, with the store that it keeps for all starts.

`python two_nodes_program.py OUT` under torchrun's variables. Each start has a line in `OUT/RANK.jsonl`; rank 1 ends
the first start, rank 0 the second, the third one is whole. torch's own gloo cannot connect in a store that is kept, so
the default group is one that needs none, as NCCL's does where it finds the right address.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (makes the backend known)

import fp8watch

EVERY, STEPS = 2, 6
FAILS = {0: 1, 1: 0}
"""Start -> the rank that ends it after `STEPS` more."""


def start_number(out: Path, rank: int) -> int:
    file = out / f"{rank}.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def main(out: Path) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    number = start_number(out, rank)
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=60)
    )
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=store)
    time.sleep(0.5 * rank)  # whoever comes first finds nothing but what earlier starts have left
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = fp8watch.attach(
        model, optimizer, policy=sys.argv[2], run="two-nodes",
        checkpoints=fp8watch.Checkpoints(out / "saved", every=EVERY, keep=9),
    )  # fmt: skip
    watch.resume()
    line = {
        "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]), "resumed": watch.global_step,
        "attempt": watch._session.attempt, "why_not": watch._session.agreement.unavailable,
    }  # fmt: skip
    with (out / f"{rank}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    for _ in range(STEPS):
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.step(loss)
    time.sleep(1.0)  # the last checkpoint is made whole when all ranks' parts are there
    watch._session.guard.call("poll", watch._session.context.checkpoints.poll)
    if number in FAILS:
        if rank == FAILS[number]:
            os._exit(9)
        time.sleep(120)  # torchrun ends it
    watch.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
