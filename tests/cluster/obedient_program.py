"""A training process of run `nightly`: `python obedient_program.py POLICY STEPS BAD_STEP`.

Prints the learning rate of its last update, and the sum of its parameters.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import fp8watch


def main(policy: str, steps: int, bad_step: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    watch = fp8watch.attach(model, optimizer, run="nightly", policy=policy)
    for step in range(1, steps + 1):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        used = watch._session.context.lr.effective[0]
        optimizer.zero_grad()
        watch.step(loss * float("nan") if step == bad_step else loss)
        time.sleep(0.1)
    total = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
    sys.stdout.write(f"{float(used):.6g} {total!r}\n")
    watch.detach()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
