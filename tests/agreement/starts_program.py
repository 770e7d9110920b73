"""One rank of a job that torchrun starts twice, each time as if on a new machine: nothing is left of what was known.

`python starts_program.py OUT RUN` under torchrun's variables. `OUT/RUN-START-RANK.jsonl` has a line a step; rank 1 ends
the first start.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fp8watch

ACTS = "{version: 1, mode: auto, rules: [{name: n, when: {detector: nonfinite}, ladder: [{action: halt}]}]}"
STEPS, LAST_OF_FIRST = 16, 7


def main(out: Path, run: str) -> None:
    number = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    os.environ["FP8WATCH_DIR"] = str(out / f"machine-{number}")  # no journal: terms and attempts are counted anew
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    watch = fp8watch.attach(model, optimizer, policy=ACTS, run=run)
    with (out / f"{run}-{number}-{rank}.jsonl").open("w", buffering=1) as file:
        for step in range(1, STEPS + 1):
            time.sleep(0.1)
            loss = model(torch.ones(2, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            used = [float(lr) for lr in watch._session.context.lr.effective]
            file.write(json.dumps({"step": step, "lr": used, "attempt": watch.attempt}) + "\n")
            watch.step(loss)
            if number == 0 and rank == 1 and step == LAST_OF_FIRST:
                os._exit(9)
    watch.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
