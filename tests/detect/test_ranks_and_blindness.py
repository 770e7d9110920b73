"""Several ranks, and missing data: replicas that diverge, one rank alone, and silence that is reported."""

from __future__ import annotations

import math

import numpy as np
import pytest
from detect_runs import columns, drive, findings

from fp8watch import columns as packing
from fp8watch.controller.merge import Merger
from fp8watch.detect.base import Sample
from fp8watch.detect.blind import Blind
from fp8watch.detect.pipeline import Pipeline
from fp8watch.detect.rank_mismatch import RankMismatch
from fp8watch.detect.stuck import Stuck
from fp8watch.records import Layout, StepFrame

TENSORS = list(columns(recipe="current"))


def step_of_ranks(step: int, scales: list[float], checksums: list[float] | None = None, **loss: float) -> list[Sample]:
    """One step of len(scales) ranks through the merger; `scales`: factor of each rank's scales."""
    merger = Merger(len(scales))
    merger.restart(step - 1)
    amax = np.exp(np.random.default_rng(step).normal(0, 0.2, len(TENSORS))).astype(np.float32)
    made: list[Sample] = []
    scale = 448 / amax
    for rank, factor in enumerate(scales):
        merger.layout(
            Layout(run="r", attempt=0, rank=rank, layout_id=0, columns=TENSORS, expected_modules=2, observed_modules=2)
        )
        scalars = {
            "loss": loss.get(f"loss{rank}", 2.0 + 0.01 * math.sin(step + rank)),
            "grad_norm": 1 + 0.1 * math.sin(step),
        }
        if checksums is not None:
            scalars["param_checksum"] = float(step * 7919 % 65537) + checksums[rank]
        made += merger.frame(
            StepFrame(
                run="r", attempt=0, rank=rank, step=step, layout_id=0, time_unix=1.0, scalars=scalars,
                columns={"amax": packing.pack(amax, "f4"), "scale": packing.pack(scale * np.float32(factor), "f4")},
            )
        )  # fmt: skip
    return made


def many(num: int, odd: dict[int, int], what: str = "scale", ranks: int = 4) -> list[Sample]:
    """`odd`: rank -> step from which it differs."""
    made = []
    for step in range(1, num + 1):
        off = [1.0 + (step >= odd[r]) * (r + 1) if r in odd else 1.0 for r in range(ranks)]
        made += (
            step_of_ranks(step, off) if what == "scale" else step_of_ranks(step, [1.0] * ranks, [f - 1 for f in off])
        )
    return made


@pytest.mark.parametrize("what", ["scale", "param"])
def test_one_rank_that_leaves_its_replicas_is_named_with_the_first_bad_step(what: str) -> None:  # case: DST-08
    found = drive(RankMismatch(), many(40, {2: 30}, what))
    assert (found[0].step, found[0].onset_step, found[0].rank, found[0].severity) == (31, 30, 2, "act")
    assert found[0].evidence["of"] == f"{what}_checksum"
    (finding,) = [f for f in findings(many(40, {2: 30}, what)) if f.detector == "rank_mismatch"]
    assert (finding.cause, finding.rank) == ("hardware", 2)


def test_scales_that_part_by_groups_are_bookkeeping() -> None:
    (finding,) = [f for f in findings(many(40, {2: 30, 3: 30})) if f.detector == "rank_mismatch"]
    assert (finding.cause, finding.rank) == ("bookkeeping", None)
    assert finding.evidence["for"]


def test_ranks_that_never_agreed_and_those_that_agree_are_silent() -> None:
    assert drive(RankMismatch(), many(60, {})) == []
    assert drive(RankMismatch(), many(60, {0: 1, 1: 1, 2: 1, 3: 1})) == []
    assert drive(RankMismatch(), many(6, {2: 4})) == []


def test_one_odd_step_is_not_enough() -> None:
    samples = many(40, {})
    samples[20] = step_of_ranks(21, [1, 1, 3, 1])[0]
    assert drive(RankMismatch(), samples) == []


def test_all_ranks_count_and_the_extreme_one_is_named() -> None:  # case: DST-05, DST-03
    (sample,) = step_of_ranks(5, [1] * 4, loss0=1.0, loss1=1.0, loss2=1.0, loss3=9.0)
    assert (sample.scalars["loss"], sample.scalars["loss_max"]) == (3.0, 9.0)
    assert (sample.rank_of_extreme["loss"], sample.rank_median["loss"]) == (3, 1.0)


def test_a_nan_on_one_rank_only_takes_the_hardware_path() -> None:
    def run(bad: int) -> list[Sample]:
        samples = [s for step in range(1, 40) for s in step_of_ranks(step, [1] * 8)]
        values = {f"loss{rank}": math.nan for rank in range(bad)}
        return samples + step_of_ranks(40, [1] * 8, **values)

    one, everyone = (next(f for f in findings(run(bad)) if f.detector == "nonfinite") for bad in (1, 8))
    assert (one.cause, one.rank) == ("hardware", 0)
    assert any("median of 8 ranks" in reason for reason in one.evidence["for"])
    assert everyone.cause == "unknown"


def live(step: int, **more: object) -> Sample:
    given: dict[str, object] = {
        "scalars": {"loss": 2.0 + 0.01 * math.sin(step), "grad_norm": 1.0},
        "tensors": tuple(TENSORS),
        "values": {"amax": np.exp(np.random.default_rng(step).normal(0, 0.2, 6)).astype(np.float32)},
        "num_ranks": 8,
        "expected_ranks": 8,
    }
    return Sample(attempt=0, step=step, **(given | more))  # type: ignore[arg-type]


def test_what_is_all_there_is_not_reported() -> None:
    assert drive(Blind(), [live(step) for step in range(1, 200)]) == []


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_ranks": 7}, "ranks"),
        ({"scalars": {"grad_norm": 1.0}}, "scalars"),
        ({"values": {}}, "tensors"),
        ({"valid": {"amax": np.array([1, 1, 0, 1, 1, 1], np.bool_)}}, "tensors"),
    ],
)
def test_what_is_missing_for_long_is_a_finding(change: dict[str, object], key: str) -> None:
    samples = [live(step, **(change if step >= 60 else {})) for step in range(1, 100)]
    found = drive(Blind(), samples)
    assert found[0].step == 75
    assert key in found[0].evidence
    assert drive(Blind(), [live(step, **(change if 60 <= step < 70 else {})) for step in range(1, 100)]) == []


def test_steps_that_never_arrive_are_a_finding_and_one_is_not() -> None:
    assert drive(Blind(), [live(step) for step in range(1, 200) if step not in (50, 120)]) == []
    found = drive(Blind(), [live(step) for step in range(1, 200) if step not in range(50, 60)])
    assert (found[0].step, found[0].evidence["missing_steps"]) == (60, 10)


def test_a_module_in_bf16_is_not_unseen() -> None:
    high = {"values": {"amax": np.ones(6, np.float32), "high_precision": np.array([0, 0, 1, 0, 0, 0], np.uint8)}}
    high["valid"] = {"amax": np.array([1, 1, 0, 1, 1, 1], np.bool_)}
    assert drive(Blind(), [live(step, **(high if step >= 60 else {})) for step in range(1, 120)]) == []


def test_a_log_of_another_tool_has_gaps_of_its_own() -> None:
    assert (
        findings([Sample(attempt=0, step=s, scalars={"loss": 2.0}) for s in range(1, 400, 7)], Pipeline("r", [Blind()]))
        == []
    )


def test_activations_that_repeat_to_the_bit_and_dead_tensors_stand_still() -> None:
    same = {"values": {"amax": np.arange(1, 7, dtype=np.float32)}}
    found = drive(Stuck(), [live(step, **(same if step >= 20 else {})) for step in range(1, 80)])
    assert found[0].evidence["stands_still"] == ["activations"]
    assert 50 <= found[0].step <= 54

    def dead(step: int) -> np.ndarray:
        amax = np.exp(np.random.default_rng(step).normal(0, 0.2, 6)).astype(np.float32)
        amax[2] = 0.0 if step >= 20 else amax[2]
        return amax

    found = drive(Stuck(), [live(step, values={"amax": dead(step)}) for step in range(1, 80)])  # case: NUM-07
    assert (found[0].step, found[0].tensors, found[0].evidence["dead_tensors"]) == (51, (2,), 1)
    assert drive(Stuck(), [live(step) for step in range(1, 300)]) == []
