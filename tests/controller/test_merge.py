"""Frames of several ranks become one sample: matched by module name, with the extreme of each quantity."""

from __future__ import annotations

import math
import time

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fp8watch import columns
from fp8watch.controller.merge import MAX_HELD_STEPS, Merger
from fp8watch.detect.base import Sample
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


def test_rank_of_an_amax_that_all_ranks_share_is_told_by_what_each_had() -> None:
    made = merger(layout(0, "a"), layout(1, "a"))
    for rank, own in ((0, 9.0), (1, 2.0)):
        shared = frame(rank, amax=[9.0])
        local = columns.pack(np.array([own]), "f4")
        found = made.frame(msgspec.structs.replace(shared, columns=shared.columns | {"amax_local": local}))
    (sample,) = found
    assert sample.rank_of_extreme["amax"] == 0
    assert sample.values["amax_local"].tolist() == [9.0]


def test_amax_that_ranks_do_not_share_is_the_largest_of_all_and_its_rank_is_named() -> None:  # case: COM-07
    made = merger(*(layout(rank, "a") for rank in range(4)))
    for rank, amax in enumerate((1.0, 1.0, 1.0)):
        assert made.frame(frame(rank, amax=[amax])) == []
    (sample,) = made.frame(frame(3, amax=[400.0]))
    assert sample.values["amax"].tolist() == [400.0]
    assert sample.rank_of_extreme["amax"] == 3
    assert sample.num_ranks == 4


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


def test_steps_come_once_and_in_order() -> None:
    made = merger(layout(0), layout(1))
    assert [made.frame(frame(0, step)) for step in (1, 2)] == [[], []]
    assert made.frame(frame(0, 2)) == []
    assert made.duplicates == 1
    assert steps(made.frame(frame(1, 1))) == [1]
    assert steps(made.frame(frame(1, 2))) == [2]
    assert not made.unseen


def test_a_rank_that_connects_late_brings_what_has_waited() -> None:
    """However far the other is ahead by then (in steps of a few milliseconds a start-up is hundreds of them)."""
    made = merger(layout(0), layout(1))
    made.join(0, 0)
    assert [made.frame(frame(0, step, loss=1.0)) for step in range(1, 200)] == [[]] * 199
    made.join(1, 0)
    found = [sample for step in range(1, 200) for sample in made.frame(frame(1, step, loss=3.0))]
    assert steps(found) == list(range(1, 200))
    assert {sample.scalars["loss"] for sample in found} == {2.0}
    assert not made.unseen


def test_an_attempt_begins_with_the_rank_that_is_furthest_back() -> None:
    """Ranks come back after a restart of the process that watches them, one with more in its queue than the other."""
    made = merger(layout(0), layout(1))
    made.restart(101)
    made.join(1, 101)
    made.join(0, 99)
    assert steps(made.frame(frame(0, 100))) == [100], "rank 1 is through with it: its frame will not come"
    assert steps(made.frame(frame(0, 101))) == [101]
    assert made.frame(frame(0, 102)) == []
    assert steps(made.frame(frame(1, 102))) == [102]
    assert not made.unseen


def test_a_frame_that_was_lost_holds_nothing_up_and_is_counted() -> None:
    made = merger(layout(0), layout(1))
    for rank in (0, 1):
        made.frame(frame(rank, 1))
    for step in (2, 3, 4):
        made.frame(frame(0, step))
    assert steps(made.frame(frame(1, 4))) == [2, 3, 4]
    assert made.unseen == {"missing": 2}


def test_a_silent_rank_is_waited_for_until_it_is_given_up() -> None:
    made = merger(layout(0), layout(1))
    for step in range(1, 9):
        assert made.frame(frame(0, step)) == []
    assert made.held_by() == (None, []), "so many may be in flight"
    made.frame(frame(0, 9))
    assert made.held_by() == (1, [None]), "of one that never spoke nothing but the number of ranks is known"
    assert steps(made.leave(None)) == list(range(1, 10))
    assert made.held_by() == (None, [])
    assert steps(made.frame(frame(0, 10))) == [10], "given up: nothing waits for it any more"
    made.frame(frame(1, 5))
    assert made.unseen == {"missing": 4, "late": 1}
    assert made.frame(frame(0, 11)) == [], "it lives: waited for again"
    assert steps([sample for step in range(6, 12) for sample in made.frame(frame(1, step))]) == [11]
    assert made.unseen == {"missing": 4, "late": 6}


def test_frames_that_are_handed_back_may_come_again_and_no_others() -> None:
    merger = Merger(2)
    for rank in (0, 1):
        merger.layout(layout(rank))
        merger.frame(frame(rank, 1))
    merger.frame(frame(0, 2, loss=1.0))
    merger.hand_back()
    assert merger.frame(frame(1, 2, loss=3.0)) == []
    (sample,) = merger.frame(frame(0, 2, loss=1.0))
    assert (sample.step, sample.scalars["loss"]) == (2, 2.0)
    assert (merger.duplicates, dict(merger.unseen)) == (0, {})
    assert merger.frame(frame(0, 1)) == []
    assert merger.unseen["late"] == 1


def test_what_is_held_back_is_bounded() -> None:
    made = merger(layout(0), layout(1))
    found = [sample for step in range(1, 301) for sample in made.frame(frame(0, step))]
    assert steps(found) == list(range(1, 301 - MAX_HELD_STEPS))
    assert steps(made.flush()) == list(range(301 - MAX_HELD_STEPS, 301))


@given(st.data())
def test_every_frame_that_comes_is_in_a_sample_or_counted(data: st.DataObject) -> None:
    """Ranks in any interleaving, with frames lost on the way: steps stay in order, and the sums agree."""
    num_ranks, num_steps = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    sent = {rank: sorted(data.draw(st.sets(st.integers(1, num_steps), min_size=1))) for rank in range(num_ranks)}
    made = merger(*(layout(rank) for rank in range(num_ranks)))
    left = {rank: list(numbers) for rank, numbers in sent.items()}
    found = []
    while any(left.values()):
        rank = data.draw(st.sampled_from([rank for rank, numbers in left.items() if numbers]))
        found += made.frame(frame(rank, left[rank].pop(0), tokens=1.0))
    found += made.flush()
    assert steps(found) == sorted(set(steps(found)))
    held = sum(sample.num_ranks for sample in found)
    assert held + made.unseen["late"] == sum(len(numbers) for numbers in sent.values())
    assert made.unseen["missing"] == sum(numbers[-1] - len(numbers) for numbers in sent.values())


def steps(samples: list[Sample]) -> list[int]:
    return [sample.step for sample in samples]


def test_how_many_ranks_a_run_is_said_to_have_costs_nothing() -> None:
    made = Merger(1_048_576)
    for rank in (0, 1):
        made.join(rank, 0)
    began = time.perf_counter()
    for step in range(1, 40):
        for rank in (0, 1):
            assert made.frame(frame(rank, step)) == []
        assert made.held_by() == ((None, []) if step < 9 else (1, [None]))
    assert time.perf_counter() - began < 1.0
    assert steps(made.leave(None)) == list(range(1, 40))
    made.join(7, 39)
    assert made.frame(frame(0, 40)) + made.frame(frame(1, 40)) == [], "one that speaks after all is waited for"
    assert steps(made.frame(frame(7, 40))) == [40]
    made.restart(40)
    for rank in (0, 1, 7):
        made.join(rank, 40)
        assert made.frame(frame(rank, 41)) == [], "in a new attempt all may come"
