"""Alternating blocks of steps of two equal trainings in one process, one bare and one watched."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
from capture_training import Training

from fp8watch.capture import patches

SETTLE = 15
"""Watched steps before the first block, until layout and kernels have settled."""

Times = dict[str, list[float]]
"""Milliseconds per step, `bare` and `watched`, pair by pair."""


def alternate(
    trainings: tuple[Training, Training],
    attach: Callable[[Training], Any],
    *,
    steps: int,
    lead: int,
    pairs: int,
    group: int = 1,
) -> Times:
    """Time blocks of `steps` steps, each after `lead` untimed steps. Which arm comes first changes from pair to pair.

    The mean of `group` consecutive pairs is one sample. So blocks can be short, with little change of the machine
    between them, even if only several of them include a sampled step. The two trainings change roles halfway, so that
    neither arm keeps the copy with the better place in memory. A watch is attached for half of the pairs at a time; the
    cost of attaching and of the first steps is not included. Python collects garbage between blocks only, as trainers
    that care about step times do. The transport thread sends a block's last frame during the next block, with `lead`
    in an untimed step of it.
    """
    times: Times = {"bare": [], "watched": []}
    for bare, watched in (trainings, trainings[::-1]):
        watch = attach(watched)
        for _ in range(SETTLE):
            watched.step(watch)
        gc.collect()
        gc.freeze()
        gc.disable()
        for pair in range(pairs // 2 * group):
            for kind in ("bare", "watched") if pair % 2 == 0 else ("watched", "bare"):
                if kind == "watched":
                    times[kind].append(block(watched, watch, lead, steps))
                else:
                    with patches.left_out():
                        times[kind].append(block(bare, None, lead, steps))
        gc.enable()
        gc.unfreeze()
        watch.detach()
    return {kind: [fmean(found[i : i + group]) for i in range(0, len(found), group)] for kind, found in times.items()}


def block(training: Training, watch: Any | None, lead: int, steps: int) -> float:
    """Milliseconds per step."""
    for _ in range(lead):
        training.step(watch)
    gc.collect(0)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        training.step(watch)
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / steps * 1e3
