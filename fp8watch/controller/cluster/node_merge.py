"""Merges the frames of all nodes into one `Sample` per step: the cluster's counterpart of `fp8watch.controller.merge`.

The rules are the same; only the input differs: all ranks of a node arrive together, with their tensors already reduced.
Nodes of one run usually announce identical layouts. Such a layout is kept once, and merging 128 nodes is one numpy call
per column.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fp8watch import columns
from fp8watch.controller import merge
from fp8watch.controller.cluster.node_frames import (
    OF_RANKS,
    OWN,
    PRECISION_CHECKSUM,
    SCALE_CHECKSUM,
    nearest_to_clipping,
    reduced,
)
from fp8watch.controller.merge import Merger
from fp8watch.detect.base import Sample
from fp8watch.errors import WireError
from fp8watch.records import Layout, NodeFrame, StepFrame, TensorColumn

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Order:
    """An order of tensors, shared by all nodes that announced it."""

    digest: bytes
    columns: list[TensorColumn]


@dataclass(frozen=True, slots=True)
class _RankScalars:
    rank: int
    scalars: dict[str, float]


class NodeMerger(Merger):
    """Collects node frames; a step is complete when all expected ranks have passed it."""

    def __init__(self, num_ranks: int = 1) -> None:
        super().__init__(num_ranks)
        self._nodes: dict[int, dict[str, NodeFrame]] = {}
        self._is_any_ahead = False
        """Whether a rank joined at a step beyond the newest merged one: its frames of the steps between never come."""
        self._orders: dict[tuple[int, int], _Order] = {}
        self._tensors: tuple[TensorColumn, ...] = ()
        self._index: dict[str, int] = {}
        self._spots: dict[bytes, npt.NDArray[np.intp] | None] = {}

    def layout(self, layout: Layout) -> None:
        """Learn a node's order of columns."""
        digest = hashlib.blake2b(msgspec.msgpack.encode(layout.columns), digest_size=16).digest()
        shared = next((order for order in self._orders.values() if order.digest == digest), None)
        self._orders[layout.rank, layout.layout_id] = shared or _Order(digest, layout.columns)
        if shared is None:
            self._number()

    def knows(self, layout: Layout) -> bool:
        """Whether this order of columns is known, with these columns."""
        order = self._orders.get((layout.rank, layout.layout_id))
        return order is not None and order.columns == layout.columns

    def can_read(self, frame: NodeFrame) -> bool:
        """Whether the order of this frame's columns is known."""
        return not frame.columns or (frame.rank, frame.layout_id) in self._orders

    def restart(self, step: int) -> None:
        """Begin a new attempt: frames after `step` are expected again."""
        super().restart(step)
        self._is_any_ahead = False
        self._nodes.clear()
        self._orders.clear()
        self._number()

    def node(self, frame: NodeFrame) -> list[Sample]:
        """Take a node's frame. Returns the samples that are complete now, in step order."""
        step = frame.step
        # An agent that was restarted in the middle of a step sends the other ranks in a second frame of the same node.
        new = [rank for rank in frame.ranks if rank not in self._waiting.get(step, {})]
        if not new:
            self.duplicates += 1
            return []
        is_late = step <= self._closed
        for rank in new:
            self._gone.discard(rank)
            newest = self._newest.get(rank, self._start)
            if step > newest + 1:
                self.unseen["missing"] += step - newest - 1
            self._newest[rank] = max(step, newest)
            if is_late:
                self.unseen["late"] += 1
            else:
                self._waiting.setdefault(step, {})[rank] = _MARK
        if not is_late:
            held = self._nodes.setdefault(step, {})
            held[frame.node if frame.node not in held else f"{frame.node}+{len(held)}"] = frame
        return self._complete()

    @property
    def closed(self) -> int:
        """Newest merged step; frames up to it are no longer needed."""
        return self._closed

    def join(self, rank: int, step: int, tensor_group: Sequence[int] = ()) -> None:
        """A rank of this attempt is present (again); its first frame is that of the step after `step`."""
        super().join(rank, step, tensor_group)
        self._is_any_ahead |= step > self._closed

    def _complete(self) -> list[Sample]:
        # Fast path for the usual case, in which every rank that has passed the oldest step has sent its frame of it:
        # checking a thousand ranks one by one for every frame would be most of the work.
        ready = []
        while self._waiting:
            step = min(self._waiting)
            if len(self._waiting[step]) >= self._num_expected():
                ready.append(self._close(step))
            elif self._is_any_ahead or max(self._waiting) > step:
                return ready + super()._complete()
            else:
                break
        return ready

    def _close(self, step: int) -> Sample:
        del self._waiting[step]
        self._closed = step
        frames = sorted(self._nodes.pop(step, {}).values(), key=lambda frame: frame.rank)
        return self._merge(frames)

    def _number(self) -> None:
        """Number all tensors again, in the order in which they became known."""
        tensors = {column.name: column for order in self._orders.values() for column in order.columns}
        self._tensors = tuple(tensors.values())
        self._index = {name: position for position, name in enumerate(tensors)}
        self._spots = {}
        for order in {order.digest: order for order in self._orders.values()}.values():
            spots = np.array([self._index[column.name] for column in order.columns], dtype=np.intp)
            is_straight = len(spots) == len(tensors) and bool((spots == np.arange(len(spots))).all())
            self._spots[order.digest] = None if is_straight else spots

    def _merge(self, frames: list[NodeFrame]) -> Sample:
        extremes: dict[str, int] = {}
        single = []
        checksums: dict[str, dict[int, float]] = {name: {} for name in OF_RANKS}
        for frame in frames:
            for rank, own in zip(frame.ranks, frame.scalars, strict=False):
                if not OF_RANKS.isdisjoint(own):
                    own = dict(own)
                    for name in OF_RANKS & own.keys():
                        checksums[name][rank] = own.pop(name)
                single.append(_RankScalars(rank, own))
        scalars = merge._merge_scalars(single, extremes)  # type: ignore[arg-type]
        described = [frame for frame in frames if (frame.rank, frame.layout_id) in self._orders and frame.columns]
        values: dict[str, Array] = {}
        valid: dict[str, Mask] = {}
        held = {
            name: stacked
            for name in dict.fromkeys(name for frame in described for name in frame.columns)
            if (stacked := self._stack(described, name)) is not None
        }
        for name, (rows, masks, _) in held.items():
            if name in OWN or name == "scale":
                continue
            valid[name] = np.logical_or.reduce(masks)
            values[name] = reduced(name, rows, masks)
        if "amax" in held:
            extremes["amax"] = _rank_of_largest(held)
        if "scale" in held:
            rows, masks, nodes = held["scale"]
            amax = np.ones_like(rows)
            if "amax" in held:
                of_node = dict(zip((node.node for node in held["amax"][2]), held["amax"][0], strict=True))
                amax = np.stack([of_node.get(node.node, np.ones(rows.shape[1], rows.dtype)) for node in nodes])
            values["scale"] = nearest_to_clipping(rows, amax, masks)
            valid["scale"] = np.logical_or.reduce(masks)
        return Sample(
            attempt=frames[0].attempt,
            step=frames[0].step,
            scalars=scalars,
            tensors=self._tensors if values else (),
            values=values,
            valid=valid,
            updates_forward=max(frame.updates_forward for frame in frames),
            updates_backward=max(frame.updates_backward for frame in frames),
            rank_of_extreme=extremes,
            num_ranks=len(single),
            expected_ranks=self.num_ranks,
            rank_median=merge._medians(single),  # type: ignore[arg-type]
            rank_values=_agreeing(single, checksums),
        )

    def _stack(self, frames: list[NodeFrame], name: str) -> tuple[Array, Mask, list[NodeFrame]] | None:
        rows, masks, nodes = [], [], []
        size = len(self._tensors)
        for frame in frames:
            column, order = frame.columns.get(name), self._orders[frame.rank, frame.layout_id]
            if column is None:
                continue
            try:
                row, mask = columns.unpack(column)
            except WireError:
                continue
            if len(row) != len(order.columns):
                continue
            spots = self._spots[order.digest]
            if spots is not None:
                row, mask = columns.spread(row, mask, spots, size)
            rows.append(row)
            masks.append(mask)
            nodes.append(frame)
        return (np.stack(rows), np.stack(masks), nodes) if rows else None


def _agreeing(single: list[_RankScalars], found: dict[str, dict[int, float]]) -> dict[str, dict[int, float]]:
    """Checksum -> rank -> value, as `merge._agreeing` returns it for rank frames."""
    if len(single) == 1:
        return {}
    parameters = {item.rank: item.scalars["param_checksum"] for item in single if "param_checksum" in item.scalars}
    return merge.checksums(parameters, found[SCALE_CHECKSUM], found[PRECISION_CHECKSUM])


def _rank_of_largest(held: dict[str, tuple[Array, Mask, list[NodeFrame]]]) -> int:
    """The rank with the largest amax of all tensors; NaN counts as the largest."""
    rows, masks, nodes = held.get("amax_local", held["amax"])
    spot = int(np.where(masks, np.where(np.isnan(rows), np.inf, rows), -np.inf).argmax())
    node, tensor = nodes[spot // rows.shape[1]], spot % rows.shape[1]
    if "amax_rank" in held:
        ranks, known, owners = held["amax_rank"]
        row = next((i for i, owner in enumerate(owners) if owner is node), None)
        if row is not None and known[row, tensor] and int(ranks[row, tensor]) < len(node.ranks):
            return int(node.ranks[int(ranks[row, tensor])])
    return int(node.rank)


_MARK = StepFrame(run="-", attempt=0, rank=0, step=0, layout_id=0, time_unix=0.0, scalars={})
"""Placeholder for a rank whose node frame has arrived."""
