"""One rank of the end-to-end run of `bench/scale_run.py`: trains a small FP8 model and breaks its scales at one step.

    python bench/scale_rank.py OUT STEPS FAULT_STEP       (with torchrun's variables and FP8WATCH_AGENT)

Writes its result to `OUT/rank-N.json`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fp8watch
from fp8watch.checkpoints.checksum import parameter_checksum
from fp8watch.demo.scenarios.scales import FrozenScale
from fp8watch.emulation import DelayedScaling, convert

SIZE, LAYERS, PAUSE_SECONDS = 32, 6, 0.1


def main(out: Path, steps: int, fault_step: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    inner = nn.Sequential(*[part for _ in range(LAYERS) for part in (nn.Linear(SIZE, SIZE), nn.SiLU())])
    convert(inner, DelayedScaling(amax_history_len=16, reduce_amax=True))
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch = fp8watch.attach(model, optimizer, policy="auto")
    while not watch._session.uplink._channel.is_connected:
        time.sleep(0.05)
    dist.barrier()
    generator = torch.Generator().manual_seed(rank)
    fault, losses = FrozenScale(fault_step, None), []
    for step in range(1, steps + 1):
        batch = torch.randn(16, SIZE, generator=generator)
        loss = ((model(batch) - batch) ** 2).mean()
        loss.backward()
        watch.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == fault_step:
            fault.happen(inner)
        watch.step(loss)
        losses.append(loss.item())
        time.sleep(PAUSE_SECONDS)
    result = {"rank": rank, "checksum": parameter_checksum(inner), "losses": losses}
    (out / f"rank-{rank}.json").write_text(json.dumps(result))
    watch.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
