"""Trains a tiny emulated-FP8 model for 30 steps and prints a digest of all that training leaves behind.

`python bit_identity_program.py bare|observe|auto`; in `bare` nothing of attach is ever imported. Data are shuffled,
dropout draws from torch's generator, and the collate function from Python's and numpy's.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from typing import Any

import numpy as np
import torch
from torch import nn

from fp8watch.emulation import convert

STEPS = 30


def collate(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    shift = random.random() * 0.01 + float(np.random.rand()) * 0.01
    return torch.stack([row[0] for row in rows]) + shift, torch.stack([row[1] for row in rows])


def digest(value: Any) -> str:
    total = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            total.update(f"{item.dtype}{tuple(item.shape)}".encode())
            total.update(
                item.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() if item.numel() else b""
            )
        elif isinstance(item, dict):
            for key in item:
                total.update(repr(key).encode())
                add(item[key])
        elif isinstance(item, list | tuple):
            for part in item:
                add(part)
        elif isinstance(item, np.ndarray):
            total.update(item.tobytes())
        else:
            total.update(repr(item).encode())

    add(value)
    return total.hexdigest()


def main(mode: str) -> dict[str, Any]:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    model = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Dropout(0.1), nn.Linear(64, 32), nn.LayerNorm(32))
    convert(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=8)
    rows = [(torch.randn(32), torch.randn(32)) for _ in range(96)]
    loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]
    watch = None
    if mode != "bare":
        import fp8watch

        watch = fp8watch.attach(
            model, optimizer, lr_scheduler=scheduler, dataloader=loader, policy=mode,
            checkpoints=fp8watch.Checkpoints("ckpt", every=10),
        )  # fmt: skip
        watch.resume()
    losses = []
    while len(losses) < STEPS:
        for inputs, targets in loader if watch is None else watch.batches(loader):
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            if watch is None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            else:
                watch.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if watch is not None:
                watch.step(loss)
            losses.append(loss.item().hex())
            if len(losses) == STEPS:
                break
    found = {
        "losses": losses,
        "parameters": digest(dict(model.named_parameters())),
        "buffers": digest(dict(model.named_buffers())),
        "optimizer": digest(optimizer.state_dict()),
        "scheduler": digest({k: v for k, v in scheduler.state_dict().items() if k != "_get_lr_called_within_step"}),
        "torch_rng": digest(torch.get_rng_state()),
        "python_rng": digest(random.getstate()),
        "numpy_rng": digest(np.random.get_state()),
        "imported": "fp8watch.training.attachment" in sys.modules or "fp8watch.training.watch" in sys.modules,
    }
    if watch is not None:
        found["failures"] = watch.failures
        found["capabilities"] = watch.capabilities
        watch.detach()
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
