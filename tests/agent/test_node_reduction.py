"""From the frames of a node's ranks to one: matched by name, largest amax, sums of counts, who was extreme."""

from __future__ import annotations

import hand_made as make
import numpy as np
import pytest

from fp8watch import columns
from fp8watch.controller import merge as by_rank
from fp8watch.controller.cluster import node_frames
from fp8watch.controller.cluster.node_merge import NodeMerger
from fp8watch.records import Column, Layout, NodeFrame, StepFrame
from fp8watch_agent.reducer import BELATED_STEPS, NodeReducer


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def reducer(clock: Clock | None = None, ranks: int = 2, **layouts: object) -> NodeReducer:
    made = NodeReducer("r", "n", clock or Clock())
    for rank in range(ranks):
        made.ranks.add(rank)
        made.layout(make.layout("r", rank=rank))
    return made


def read(frame: NodeFrame, name: str) -> list[float]:
    values, valid = columns.unpack(frame.columns[name])
    return [float(v) if ok else -1.0 for v, ok in zip(values, valid, strict=True)]


def test_two_ranks_become_one_frame() -> None:
    made = reducer()
    first = make.frame("r", 1, 6, rank=0, amax=[1, 5, 1, 1, None, 2], scale=[8, 8, 8, 8, 8, 8], saturated=3)
    second = make.frame("r", 1, 6, rank=1, amax=[2, 4, 1, 1, 7, 1], scale=[9, 9, 9, 9, 9, 9], saturated=4)
    assert made.frame(first) == []
    (node,) = made.frame(second)
    assert node.ranks == [0, 1]
    assert read(node, "amax") == [2, 5, 1, 1, 7, 2]
    assert read(node, "amax_rank") == [1, 0, 0, 0, 1, 0]
    assert read(node, "amax_low") == [1, 4, 1, 1, 7, 1]
    assert read(node, "saturated") == [7] * 6
    assert read(node, "scale") == [9, 8, 9, 9, 9, 8], "of the rank nearest to clipping"
    assert node.scalars[0]["scale_checksum"] != node.scalars[1]["scale_checksum"]
    assert [scalars["loss"] for scalars in node.scalars] == [2.0, 2.0]


# case: DST-03
def test_ranks_that_hold_other_modules_are_matched_by_name() -> None:
    made = NodeReducer("r", "n", Clock())
    made.ranks |= {0, 1}
    tensors = ("input", "weight")
    made.layout(make.layout("r", rank=0, blocks=1, modules=("up", "down"), tensors=tensors))
    announced = made.layout(make.layout("r", rank=1, blocks=1, modules=("down", "gate"), tensors=tensors))
    assert announced is not None
    names = [column.name for column in announced.columns]
    assert names == [f"blocks.0.{m}:{t}" for m in ("up", "down", "gate") for t in tensors]
    made.frame(make.frame("r", 1, 4, rank=0, amax=[1, 2, 3, 4], scalars={"loss": 1.0, "acc": 5.0}))
    (node,) = made.frame(make.frame("r", 1, 4, rank=1, amax=[9, 1, 5, 6], scalars={"acc": 7.0}))
    assert dict(zip(names, read(node, "amax"), strict=True)) == {
        "blocks.0.up:input": 1, "blocks.0.up:weight": 2, "blocks.0.down:input": 9, "blocks.0.down:weight": 4,
        "blocks.0.gate:input": 5, "blocks.0.gate:weight": 6,
    }  # fmt: skip
    assert node.scalars == [{"loss": 1.0, "acc": 5.0}, {"acc": 7.0}], "missing for that rank only"


def test_a_nan_amax_is_the_largest_and_names_its_rank() -> None:
    made = reducer()
    made.frame(make.frame("r", 1, 6, rank=0, amax=1.0))
    (node,) = made.frame(make.frame("r", 1, 6, rank=1, amax=[float("nan"), 1, 1, 1, 1, 1]))
    values, _ = columns.unpack(node.columns["amax"])
    assert np.isnan(values[0])
    assert read(node, "amax_rank")[0] == 1


def test_a_late_rank_follows_alone_and_a_hopeless_one_is_counted() -> None:
    clock = Clock()
    made = reducer(clock)
    assert made.frame(make.frame("r", 1, 6, rank=0)) == []
    clock.now = 1.1
    (node,) = made.tick()
    assert node.ranks == [0]
    (late,) = made.frame(make.frame("r", 1, 6, rank=1))
    assert late.ranks == [1]
    for step in range(2, BELATED_STEPS + 10):
        made.frame(make.frame("r", step, 6, rank=0))
    assert made.frame(make.frame("r", 1, 6, rank=1)) == []
    assert made.lost["late"] == 1


def test_steps_leave_in_order_and_a_rank_that_left_is_not_waited_for() -> None:
    made = reducer()
    for step in (1, 2):
        made.frame(make.frame("r", step, 6, rank=0))
    assert [node.step for node in made.left(1)] == [1, 2]
    (node,) = made.frame(make.frame("r", 3, 6, rank=0))
    assert node.ranks == [0]


def test_a_column_that_does_not_fit_is_counted_and_the_next_step_is_fine() -> None:
    made = reducer()
    made.frame(make.frame("r", 1, 5, rank=0, amax=1.0))
    assert made.frame(make.frame("r", 1, 6, rank=1, amax=1.0)) == []
    assert made.lost["malformed"] == 2
    made.frame(make.frame("r", 2, 6, rank=0, amax=1.0))
    assert len(made.frame(make.frame("r", 2, 6, rank=1, amax=1.0))) == 1


def sample_both_ways(frames: list[list[StepFrame]], layouts: list[Layout]) -> tuple[by_rank.Sample, by_rank.Sample]:
    """The same ranks' frames merged at once, and node by node; two ranks a node."""
    single = [frame for node in frames for frame in node]
    straight = by_rank.merge(
        single, {(item.rank, item.layout_id): item for item in layouts}, expected_ranks=len(single)
    )
    merger = NodeMerger(len(single))
    samples: list[by_rank.Sample] = []
    for number, node in enumerate(frames):
        order = node_frames.NodeLayout()
        lead = node[0].rank
        for layout in layouts[2 * number : 2 * number + 2]:
            order.add(layout.rank, layout.layout_id, layout.columns)
        merger.layout(
            Layout(run="r", attempt=0, rank=lead, layout_id=1, columns=list(order.columns.values()),
                   expected_modules=1, observed_modules=1)
        )  # fmt: skip
        reduced = node_frames.reduce(node, order, node=f"n{number}", layout_id=1, lead=lead)
        samples += merger.node(reduced)
    (through_nodes,) = samples
    return straight, through_nodes


@pytest.mark.parametrize("seed", range(6))
def test_reducing_by_node_comes_to_the_same_as_merging_all_ranks(seed: int) -> None:
    """What detectors see does not depend on how ranks are spread over nodes."""
    dice = np.random.default_rng(seed)
    kinds = [("up", "down"), ("up", "down")] if seed % 2 else [("up", "down"), ("down", "gate")]
    layouts, frames = [], []
    for node in range(3):
        frames.append([])
        for local in range(2):
            rank = 2 * node + local
            layouts.append(make.layout("r", rank=rank, blocks=2, modules=kinds[local]))
            size = len(layouts[-1].columns)
            known = [bool(x) for x in dice.random(size) > 0.2]
            amax = [float(a) if ok else None for a, ok in zip(dice.random(size) * 100, known, strict=True)]
            frames[-1].append(
                make.frame(
                    "r", 1, size, rank=rank, amax=amax, scale=[float(s) for s in dice.random(size) + 0.5],
                    quantized=[int(n) for n in dice.integers(0, 1000, size)],
                    snr=[float(s) for s in dice.random(size) * 30],
                    what_if_margin_1_saturated=[int(n) for n in dice.integers(0, 1000, size)],
                    what_if_margin_1_snr=[float(s) if s > 5 else float("nan") for s in dice.random(size) * 30],
                    scalars={"loss": float(dice.random()), "grad_norm": float(dice.random()), "tokens": 10.0},
                )
            )  # fmt: skip
    straight, through = sample_both_ways(frames, layouts)
    assert through.num_ranks == straight.num_ranks == 6
    assert through.scalars == pytest.approx(straight.scalars)
    names = {column.name: position for position, column in enumerate(straight.tensors)}
    order = [names[column.name] for column in through.tensors]
    for name in ("amax", "quantized", "snr", "what_if_margin_1_saturated", "what_if_margin_1_snr"):
        assert (through.valid[name] == straight.valid[name][order]).all(), name
        seen = through.valid[name]
        np.testing.assert_array_equal(through.values[name][seen], straight.values[name][order][seen], name)
    assert through.rank_median == straight.rank_median
    assert through.rank_values == straight.rank_values
    assert "scale_checksum" in through.rank_values
    assert through.expected_ranks == 6
    assert through.rank_of_extreme["amax"] == straight.rank_of_extreme["amax"]
    assert through.rank_of_extreme["loss"] == straight.rank_of_extreme["loss"]
    # Where a rank has a scale and no amax, a rank's own merge takes a stale zero for it; compared where both are seen.
    both = through.valid["amax"] & straight.valid["scale"][order]
    frames_all = [frame for node in frames for frame in node]
    if all(columns.unpack(frame.columns["amax"])[1].all() for frame in frames_all):
        assert (through.values["scale"][both] == straight.values["scale"][order][both]).all()


def test_the_rank_of_the_largest_amax_is_known_where_amax_is_the_same_on_all_ranks() -> None:
    """After a reduction across ranks only `amax_local` tells whose it is."""
    layouts = [make.layout("r", rank=rank) for rank in range(4)]
    single = [make.frame("r", 1, 6, rank=rank, amax=9.0, amax_local=9.0 if rank == 3 else 2.0) for rank in range(4)]
    straight, through = sample_both_ways([single[:2], single[2:]], layouts)
    assert through.rank_of_extreme["amax"] == straight.rank_of_extreme["amax"] == 3


def test_a_node_frame_read_by_rank_keeps_the_columns_once() -> None:
    node = NodeFrame(
        run="r", attempt=0, node="n", rank=3, step=1, layout_id=1, time_unix=1.0, ranks=[3, 5],
        scalars=[{"loss": 1.0}, {"loss": 2.0}], columns={"amax": Column(dtype="f4", data=bytes(4))},
    )  # fmt: skip
    first, second = node_frames.expand(node)
    assert (first.rank, second.rank) == (3, 5)
    assert first.columns
    assert not second.columns
