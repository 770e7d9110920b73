"""Alternating blocks of steps of two equal trainings in one process, one bare and one watched."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

import torch
from capture_training import Training

from fp8watch.capture import patches

SETTLE = 15
"""Watched steps before the first block at least, until layout and kernels have settled."""

Times = dict[str, list[float]]
"""Milliseconds per step of each block, `bare` and `watched`, pair by pair."""


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

    There are `pairs` groups of `group` pairs; in every group the same pairs include a sampled step (`ratio_of`), which
    is timed: every so many watched steps, a multiple of `lead + steps`. The two trainings change roles halfway, so that
    neither arm keeps the copy with the better place in memory. A watch is attached for half of the groups at a time;
    the cost of attaching and of the first steps is not included. Python collects garbage between blocks only, as
    trainers that care about step times do. The transport thread sends a watched step's frame during the step after it.
    With `lead` each timed block pays for as many frames as it has steps: for that of the untimed step before it, and
    its own last one is sent in the untimed step of the next block. Without, one frame in `steps` is sent in the bare
    block where that comes second, and in a watched one after another pair.
    """
    if pairs < 2:
        raise ValueError(f"{pairs} groups: each of the two roles needs one")
    times: Times = {"bare": [], "watched": []}
    for bare, watched in (trainings, trainings[::-1]):
        watch = attach(watched)
        for _ in range(settle(steps, lead)):
            watched.step(watch)
        gc.collect()
        gc.freeze()
        gc.disable()
        for pair in range(pairs // 2 * group):
            is_bare_first = (pair // group + pair % group) % 2 == 0  # alternates at every place of a group
            for kind in ("bare", "watched") if is_bare_first else ("watched", "bare"):
                if kind == "watched":
                    times[kind].append(block(watched, watch, lead, steps))
                else:
                    with patches.left_out():
                        times[kind].append(block(bare, None, lead, steps))
        gc.enable()
        gc.unfreeze()
        watch.detach()
    return times


def settle(steps: int, lead: int) -> int:
    """Steps before the first block: then the first timed step of a block is one more than a multiple of
    `lead + steps`, as sampled steps are (`fp8watch.capture.governor.Governor.due`)."""
    return SETTLE + -(SETTLE + lead) % (lead + steps)


def typical(values: Sequence[float], group: int = 1) -> float:
    """The mean over the places in a group of the median over the groups; with `group` 1 the median.

    A plain median would never show a sampled step that one block in five includes; a mean of groups lets one slow block
    decide, and a machine has many. It is still a median: work that comes with another period than a group, or a cost
    that few sampled steps have, shows in the ratio of the means only, which is reported beside it.
    """
    return fmean(median(values[place::group]) for place in range(group))


def ratio_of(times: Times, group: int = 1, rounds: int = 4000) -> tuple[float, tuple[float, float]]:
    """Watched over bare by neighbouring blocks: `typical`, and its 95 % interval by resampling groups."""
    ratios = [watched / bare for watched, bare in zip(times["watched"], times["bare"], strict=True)]
    groups = [ratios[i : i + group] for i in range(0, len(ratios), group)]
    rng = random.Random(0)
    found = sorted(
        typical([ratio for one in rng.choices(groups, k=len(groups)) for ratio in one], group) for _ in range(rounds)
    )
    return typical(ratios, group), (found[int(0.025 * rounds)], found[int(0.975 * rounds)])


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
