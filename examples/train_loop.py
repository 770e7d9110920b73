"""The ten lines to add to your own loop, with a tiny model that runs anywhere (FP8 emulated on the CPU).

Run it with `python examples/train_loop.py`, then look at the run with `fp8watch runs list`.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fp8watch
from fp8watch.emulation import convert


def make_model(width: int = 64, vocabulary: int = 64) -> nn.Module:
    model = nn.Sequential(nn.Embedding(vocabulary, width), nn.Linear(width, 2 * width), nn.SiLU())
    model.extend([nn.Linear(2 * width, width), nn.Linear(width, vocabulary)])
    convert(model)
    return model


def make_loader(samples: int = 2048, length: int = 16, vocabulary: int = 64) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Sequences in which each token is a fixed function of the previous one."""
    start = torch.randint(vocabulary, (samples, 1))
    tokens = (start + torch.arange(length + 1) * 7) % vocabulary
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=16, shuffle=True)


def train_forward(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def main(arguments: list[str] | None = None) -> float | None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--policy", default="observe")
    parser.add_argument("--checkpoints", default="ckpt")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    model, loader = make_model(), make_loader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)

    watch = fp8watch.attach(
        model, optimizer, lr_scheduler=scheduler, dataloader=loader,
        checkpoints=fp8watch.Checkpoints(options.checkpoints, every=20), policy=options.policy,
    )  # fmt: skip
    watch.resume()  # newest checkpoint that is not tainted, if any
    loss = None
    while watch.global_step < options.steps:
        for batch in watch.batches(loader):  # the loader, with a position that a rollback can restore
            loss = train_forward(model, batch)
            loss.backward()
            watch.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            watch.step(loss)  # step boundary: record, apply what is due, save
            if watch.global_step >= options.steps:
                break
    watch.detach()
    return None if loss is None else float(loss.detach())


if __name__ == "__main__":
    final = main()
    print("nothing to train: all steps are done already" if final is None else f"final loss {final:.4f}")
