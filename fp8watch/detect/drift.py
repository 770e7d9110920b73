"""Slow rises of one value per tensor: means over blocks of points, on three time scales.

A spike detector's baseline follows a drift and never sees it. Here the points of a tensor are averaged over blocks of
`BLOCK`; eight blocks make one block of the next scale. A tensor is rising when three conditions hold:
- each of the last `KEEP` blocks of a scale is above the one before it (chance 1/5040 for 7 blocks without a trend);
- the rise, without its largest step and scaled up to the window, exceeds `SIGMA` times the scatter of the blocks around
  a straight line (leaving the largest step out tells a drift from a level shift);
- it is not slowing down: its last three steps make at least `STEADY` of its first three (growth that slows down is a
  model that settles).
Nothing is reported before a scale has seen two windows, because everything moves in a young model. Points are clipped
to `CLIP` around the previous block, so that one outlier moves a mean by at most a thirty-second of that; a block that
rises by all of `CLIP` follows a level shift, which is no drift either. Cost: two additions per tensor and step.
"""

from __future__ import annotations

import msgspec
import numpy as np

from fp8watch.detect.tensors import Array, carried, moved

BLOCK = 32
"""Points per block of the finest scale."""
FACTOR = 8
"""Blocks that make one of the next scale."""
SCALES = 3
"""Windows of 224, 1,792 and 14,336 points."""
KEEP = 7
"""Blocks in a window."""
CLIP = 1.0
"""Largest distance of a point from the previous block (log2 units: one bit)."""
SIGMA = 6.0
"""A rise must exceed this many times the scatter of the blocks."""
SHIFT = 0.9
"""A step between blocks of the finest scale of at least this share of `CLIP` is a level shift."""
STEADY = 0.7
"""Smallest allowed ratio of the window's last three steps to its first three."""
MIN_PEERS = 4
"""Smallest number of tensors of a kind whose median a tensor is compared with."""


class Scale(msgspec.Struct):
    """One time scale."""

    blocks: Array
    """[num_tensors, KEEP] float32 means, oldest first, NaN where missing."""
    sums: Array
    """[num_tensors] sum of the current block: of finished blocks of the finer scale (of points at the finest)."""
    counts: Array
    points: int = 0
    """How many points were added, whether or not a tensor was observed in them."""
    firsts: list[int] = []
    """First step of each block in `blocks`."""
    begun: int = -1
    ended: int = 0
    """Blocks that have ended since the start."""


class Trends(msgspec.Struct):
    """All time scales of all tensors."""

    names: list[str] = []
    scales: list[Scale] = []

    def follow(self, names: list[str]) -> None:
        """Match the sample's tensors by name; new ones start empty."""
        rows = moved(names, self.names)
        if not self.scales:
            self.scales = [_empty(len(names)) for _ in range(SCALES)]
        elif rows is not None:
            for scale in self.scales:
                scale.blocks = carried(scale.blocks, rows, np.nan)
                scale.sums, scale.counts = carried(scale.sums, rows, 0), carried(scale.counts, rows, 0)
        self.names = names

    def push(self, values: Array, usable: Array, step: int) -> list[int]:
        """Add one point per tensor; returns the scales whose block has ended with it."""
        fine = self.scales[0]
        level = fine.blocks[:, -1]
        with np.errstate(invalid="ignore"):
            near = np.where(np.isnan(level), values, np.clip(values, level - CLIP, level + CLIP))
        if usable.all():
            fine.sums += near
            fine.counts += 1
        else:
            fine.sums += np.where(usable, near, 0.0)
            fine.counts += usable
        fine.begun = step if fine.points == 0 else fine.begun
        fine.points += 1
        return self._end_blocks()

    def push_block(self, values: Array, step: int) -> list[int]:
        """Like `push`, for `BLOCK` points at once, all observed: [num_tensors, BLOCK], the first at `step`. Do not mix
        it with `push`."""
        fine = self.scales[0]
        level = fine.blocks[:, -1:]
        with np.errstate(invalid="ignore"):
            near = np.where(np.isnan(level), values, np.clip(values, level - CLIP, level + CLIP))
        fine.sums += near.sum(axis=1)
        fine.counts += values.shape[1]
        fine.begun, fine.points = step, values.shape[1]
        return self._end_blocks()

    def _end_blocks(self) -> list[int]:
        ended = []
        for i, scale in enumerate(self.scales):
            if scale.points < (BLOCK if i == 0 else FACTOR):
                break
            mean = _close(scale)
            ended.append(i)
            if i + 1 < SCALES:
                _add(self.scales[i + 1], mean, scale.firsts[-1])
        return ended

    def rise(self, i: int) -> Array:
        """[num_tensors] how far the steady part of a scale's window has risen; 0 where no rise is certain."""
        scale = self.scales[i]
        if len(scale.firsts) < KEEP or scale.ended < 2 * KEEP:
            return np.zeros(len(scale.sums))
        blocks = scale.blocks.astype(np.float64)
        steps = np.diff(blocks, axis=1)
        is_rising = (steps > 0).all(axis=1)
        if not is_rising.any():
            return np.zeros(len(scale.sums))
        rise = (steps.sum(axis=1) - steps.max(axis=1)) * (KEEP - 1) / (KEEP - 2)
        x = np.arange(KEEP) - (KEEP - 1) / 2
        line = (blocks @ x / (x @ x))[:, None] * x
        scatter = np.sqrt(((blocks - blocks.mean(axis=1)[:, None] - line) ** 2).sum(axis=1) / (KEEP - 2))
        with np.errstate(invalid="ignore"):
            is_steady = steps[:, -3:].sum(axis=1) >= STEADY * steps[:, :3].sum(axis=1)
            is_rising &= (rise > SIGMA * scatter) & is_steady
            if i == 0:
                is_rising &= (steps < SHIFT * CLIP).all(axis=1)
        return np.where(is_rising, rise, 0.0)

    def kept(self, i: int, before: Array, now: Array) -> Array:
        """[num_tensors] the new verdict, or the old one where there is none (0) but the newest block is still above the
        block half a window ago: a drift that pauses for one block is the same drift."""
        blocks = self.scales[i].blocks
        with np.errstate(invalid="ignore"):
            goes_on = blocks[:, -1] > blocks[:, KEEP // 2]
        return np.where(now > 0, now, np.where(goes_on, before, 0.0))

    def change(self, i: int) -> Array:
        """[num_tensors] newest block of a scale minus the first of its window; NaN where either is missing."""
        blocks = self.scales[i].blocks.astype(np.float64)
        difference: Array = blocks[:, -1] - blocks[:, 0]
        return difference

    def window(self, i: int) -> tuple[int, int]:
        """First step of a scale's window, and its length in points."""
        return self.scales[i].firsts[0], KEEP * BLOCK * FACTOR**i

    def cut(self, step: int) -> None:
        """Roll back to `step`: forget blocks that extend beyond it, and the current ones."""
        for scale in self.scales:
            ends = [*scale.firsts[1:], scale.begun if scale.points else 2**62]
            keep = sum(end <= step + 1 for end in ends)
            gone = len(scale.firsts) - keep
            if gone > 0:
                scale.blocks[:, gone:] = scale.blocks[:, : KEEP - gone].copy()
                scale.blocks[:, :gone] = np.nan
                del scale.firsts[keep:]
            scale.sums[:], scale.counts[:], scale.points = 0, 0, 0


def beyond_peers(rise: Array, kinds: Array, limit: float, alone_limit: float) -> Array:
    """[num_tensors] rise above the median of the tensor's kind, where that reaches `limit`, else 0.

    `kinds`: [num_tensors] as in `Table.kinds`. In a kind of fewer than `MIN_PEERS` tensors there is no such median, and
    the rise itself has to reach `alone_limit`.
    """
    excess = rise.copy()
    for kind in np.unique(kinds[rise > 0]):
        peers = kinds == kind
        is_alone = int(peers.sum()) < MIN_PEERS
        beyond = rise[peers] - (0.0 if is_alone else np.median(rise[peers]))
        excess[peers] = np.where(beyond >= (alone_limit if is_alone else limit), beyond, 0.0)
    return excess


def _empty(num: int) -> Scale:
    return Scale(
        blocks=np.full((num, KEEP), np.nan, dtype=np.float32), sums=np.zeros(num), counts=np.zeros(num, dtype=np.int64)
    )


def _add(scale: Scale, mean: Array, first: int) -> None:
    seen = np.isfinite(mean)
    scale.sums += np.where(seen, mean, 0.0)
    scale.counts += seen
    scale.begun = first if scale.points == 0 else scale.begun
    scale.points += 1


def _close(scale: Scale) -> Array:
    """End the current block; returns its means, NaN where fewer than half of its points were observed."""
    enough = scale.counts * 2 >= scale.points
    mean: Array = np.where(enough, scale.sums / np.maximum(scale.counts, 1), np.nan)
    scale.blocks[:, :-1] = scale.blocks[:, 1:]
    scale.blocks[:, -1] = mean
    scale.firsts = [*scale.firsts, scale.begun][-KEEP:]
    scale.sums[:], scale.counts[:], scale.points, scale.ended = 0, 0, 0, scale.ended + 1
    return mean
