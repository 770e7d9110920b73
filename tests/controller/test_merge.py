"""Frames of several ranks become one sample: by module name, with the extreme of what can be extreme."""

from __future__ import annotations

import math

import numpy as np

from fp8watch import columns
from fp8watch.controller.merge import Merger
from fp8watch.records import Layout, StepFrame, TensorColumn


def layout(rank: int, *modules: str) -> Layout:
    described = [TensorColumn(module=name, tensor="input", block="0", fp8_format="E4M3") for name in modules]
    return Layout(
        run="r", attempt=0, rank=rank, layout_id=0, columns=described, expected_modules=len(described),
        observed_modules=len(described),
    )  # fmt: skip


def frame(
    rank: int, step: int = 1, amax: list[float] | None = None, scale: list[float] | None = None,
    valid: list[bool] | None = None, **scalars: float,
) -> StepFrame:  # fmt: skip
    mask = None if valid is None else np.array(valid)
    packed = {}
    if amax is not None:
        packed["amax"] = columns.pack(np.array(amax), "f4", mask)
    if scale is not None:
        packed["scale"] = columns.pack(np.array(scale), "f4", mask)
    return StepFrame(
        run="r", attempt=0, rank=rank, step=step, layout_id=0, time_unix=0, scalars=scalars, columns=packed
    )


def merger(*layouts: Layout) -> Merger:
    made = Merger(len(layouts))
    for item in layouts:
        made.layout(item)
    return made


def test_scalars_are_averaged_summed_or_the_extreme() -> None:
    made = merger(layout(0), layout(1))
    assert made.frame(frame(0, loss=1.0, grad_norm=2.0, tokens=10.0)) == []
    (sample,) = made.frame(frame(1, loss=3.0, grad_norm=5.0, tokens=12.0))
    assert sample.scalars == {"loss": 2.0, "loss_max": 3.0, "grad_norm": 5.0, "tokens": 22.0}
    assert sample.rank_of_extreme["grad_norm"] == 1
    assert sample.num_ranks == 2


def test_a_nan_on_one_rank_is_not_averaged_away() -> None:
    made = merger(layout(0), layout(1))
    made.frame(frame(0, loss=math.nan, grad_norm=math.nan))
    (sample,) = made.frame(frame(1, loss=3.0, grad_norm=1.0))
    assert math.isnan(sample.scalars["loss"])
    assert math.isnan(sample.scalars["grad_norm"])
    assert sample.rank_of_extreme["loss"] == 0


def test_columns_are_matched_by_module_and_not_by_position() -> None:
    made = merger(layout(0, "a", "b"), layout(1, "b", "c"))
    made.frame(frame(0, amax=[1.0, 2.0], scale=[10.0, 10.0]))
    (sample,) = made.frame(frame(1, amax=[5.0, 7.0], scale=[20.0, 30.0]))
    assert [column.module for column in sample.tensors] == ["a", "b", "c"]
    assert sample.values["amax"].tolist() == [1.0, 5.0, 7.0]
    assert sample.values["scale"].tolist() == [10.0, 20.0, 30.0]
    assert sample.rank_of_extreme["amax"] == 1


def test_what_no_rank_observed_stays_unobserved() -> None:
    made = merger(layout(0, "a", "b"), layout(1, "a", "b"))
    made.frame(frame(0, amax=[1.0, 9.0], valid=[True, False]))
    (sample,) = made.frame(frame(1, amax=[0.5, 9.0], valid=[True, False]))
    assert sample.values["amax"][0] == 1.0
    assert sample.valid["amax"].tolist() == [True, False]


def test_a_frame_without_its_layout_gives_its_scalars() -> None:
    made = Merger(1)
    (sample,) = made.frame(frame(0, amax=[1.0], loss=2.0))
    assert sample.scalars == {"loss": 2.0}
    assert sample.values == {}


def test_steps_come_once_and_in_order_and_do_not_wait_for_ever() -> None:
    made = merger(layout(0), layout(1))
    steps = [sample.step for step in range(1, 9) for sample in made.frame(frame(0, step))]
    assert steps == [1, 2, 3, 4], "rank 1 is silent: a step is closed when it is four behind"
    assert made.frame(frame(1, 2)) == []
    assert made.duplicates == 1
    assert [sample.step for sample in made.without(1)] == [5, 6, 7, 8]
