"""A rank's own opinion: drastic orders for which it sees no reason are refused, others never."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from fp8watch.columns import pack
from fp8watch.records import Command, Layout, StepFrame, TensorColumn
from fp8watch.training.evidence import Evidence
from fp8watch.transport.pending import PendingFrame


class Made:
    """A frame's parts, put together already."""

    def __init__(self, frame: StepFrame) -> None:
        self.step, self._frame = frame.step, frame

    def frame(self) -> StepFrame:
        return self._frame

    def scalars(self) -> dict[str, float]:
        return self._frame.scalars


LAYOUT = Layout(
    run="r", attempt=0, rank=0, layout_id=1, expected_modules=1, observed_modules=1,
    columns=[
        TensorColumn(module="a", tensor="input", block="0", fp8_format="e4m3"),
        TensorColumn(module="b", tensor="input", block="0", fp8_format="e4m3"),
    ],
)  # fmt: skip
ONSET = 60


def order(action: str = "rollback", verb: str = "apply", **because: Any) -> Command:
    return Command(
        id="a1", run="r", attempt=0, term=1, sequence=1, verb=verb, action=action, last_step=1000,  # type: ignore[arg-type]
        because={"onset_step": ONSET, **because},
    )  # fmt: skip


def watched(steps: int = 80, *, rank: int = 0, **trouble: Any) -> Evidence:
    """A rank that has seen ordinary steps, but for `trouble` (scalars, or amax and scale of `a:input`) at the onset."""
    noise = random.Random(0)
    evidence = Evidence(rank, world_size=4)
    for step in range(1, steps + 1):
        now = trouble if step == ONSET + 1 else {}
        # Within the band by construction: what is tested is the rule and not chance.
        scalars = {"loss": 2.0 * math.exp(noise.uniform(-0.1, 0.1)), "grad_norm": math.exp(noise.uniform(-0.3, 0.3))}
        scalars |= {name: value for name, value in now.items() if name not in ("amax", "scale", "underflowed")}
        amax, scale = now.get("amax", 1.0), now.get("scale", 448.0)
        columns = {
            "amax": pack(np.array([amax, 1.0]), "f4"),
            "scale": pack(np.array([scale, 448.0]), "f4"),
            "quantized": pack(np.array([1000, 1000]), "u8"),
            "underflowed": pack(np.array([now.get("underflowed", 0), 0]), "u8"),
        }
        frame = StepFrame(
            run="r", attempt=0, rank=rank, step=step, layout_id=1, time_unix=0.0, scalars=scalars, columns=columns
        )  # fmt: skip
        evidence.note(PendingFrame(Made(frame), frame.step), LAYOUT)
    return evidence


@pytest.mark.parametrize("tensors", [5, "a:input", {"a:input": 1}, True])
def test_tensors_that_are_no_list_are_an_objection(tensors: Any) -> None:
    found = watched(loss=math.nan).objection(order(tensors=tensors))
    assert found is not None
    assert "a list is wanted" in found


@pytest.mark.parametrize("action", ["rollback", "bf16_all", "halt"])
def test_nothing_seen_is_an_objection(action: str) -> None:
    found = watched().objection(order(action))
    assert found is not None
    assert "rank 0 sees nothing unusual in its own frames (steps 60 to 80)" in found


@pytest.mark.parametrize(
    "trouble",
    [
        {"loss": math.nan}, {"grad_norm": math.inf}, {"param_nonfinite": 1.0}, {"update_skipped": 1.0},
        {"loss": 4.0}, {"loss": 0.5}, {"grad_norm": 30.0},
    ],
)  # fmt: skip
def test_what_it_has_seen_itself_is_reason_enough(trouble: dict[str, float]) -> None:
    assert watched(**trouble).objection(order()) is None


@pytest.mark.parametrize(
    "trouble",
    [
        {"amax": math.inf}, {"scale": math.nan}, {"scale": 0.0}, {"amax": 1.5}, {"scale": 448.0 / 64},
        {"underflowed": 50},
    ],
)  # fmt: skip
def test_of_tensors_only_those_count_that_are_named(trouble: dict[str, float]) -> None:
    evidence = watched(**trouble)
    assert evidence.objection(order(tensors=["a:input"])) is None
    assert evidence.objection(order(tensors=["b:input"])) is not None
    assert evidence.objection(order(tensors=["nowhere:input"])) is not None


def test_a_slow_rise_is_seen_in_the_mean() -> None:
    evidence = watched(ONSET)
    for step in range(ONSET + 1, ONSET + 20):
        frame = StepFrame(
            run="r", attempt=0, rank=0, step=step, layout_id=1, time_unix=0.0, scalars={"loss": 2.0 * math.exp(0.15)}
        )  # fmt: skip
        evidence.note(PendingFrame(Made(frame), frame.step), LAYOUT)
    assert evidence.objection(order()) is None


def test_another_rank_s_trouble_is_not_this_one_s_to_judge() -> None:
    evidence = watched(rank=1)
    assert evidence.objection(order(rank=2)) is None
    assert evidence.objection(order(rank=1)) is not None
    assert "there is none" in str(evidence.objection(order(rank=99)))  # a name that nobody answers to is no way round


def test_trouble_before_the_onset_that_is_named_does_not_count() -> None:
    assert watched(120, loss=9.0).objection(order(onset_step=100)) is not None


@pytest.mark.parametrize("command", [order("hold_lr"), order("bf16_layers"), order("rollback", verb="revert")])
def test_what_is_not_drastic_needs_no_opinion(command: Command) -> None:
    assert watched().objection(command) is None


def test_a_young_run_has_nothing_to_compare_with() -> None:
    assert watched(70).objection(order(onset_step=10)) is None


def test_without_an_onset_the_last_steps_are_looked_at() -> None:
    command = Command(
        id="a1", run="r", attempt=0, term=1, sequence=1, verb="apply", action="halt", last_step=1000
    )  # fmt: skip
    assert watched().objection(command) is not None
    assert watched(loss=9.0).objection(command) is None


class Unreadable(Made):
    """Its columns cannot be put together, or nothing of it."""

    def __init__(self, step: int, *, has_scalars: bool) -> None:
        self.step, self._has_scalars = step, has_scalars

    def frame(self) -> StepFrame:
        raise KeyError("amax")

    def scalars(self) -> dict[str, float]:
        if self._has_scalars:
            return {"loss": 2.0}
        raise KeyError("loss")


@pytest.mark.parametrize("has_scalars", [True, False])
def test_a_frame_that_cannot_be_read_does_not_make_the_rank_agree(has_scalars: bool) -> None:
    evidence = watched()
    evidence.note(PendingFrame(Unreadable(81, has_scalars=has_scalars), 81), LAYOUT)
    found = evidence.objection(order(tensors=["a:input"]))
    assert found is not None
    assert "sees nothing unusual in its own frames" in found


@pytest.mark.parametrize("steps", [150, 190, 193, 256, 257, 300])
def test_what_is_long_past_speaks_for_nothing_at_whatever_step(steps: int) -> None:
    """Frames are let go many at a time, but the second opinion is always about the same number of them."""
    evidence = Evidence(0, world_size=4)
    for step in range(1, steps + 1):
        amax = 4.0 if step <= steps - 70 else 1.0
        columns = {name: pack(np.array([value, value]), "f4") for name, value in (("amax", amax), ("scale", 448.0))}
        frame = StepFrame(
            run="r", attempt=0, rank=0, step=step, layout_id=1, time_unix=0.0, columns=columns,
            scalars={"loss": 2.0 + 0.01 * (step % 7), "grad_norm": 1.0 + 0.01 * (step % 5)},
        )  # fmt: skip
        evidence.note(PendingFrame(Made(frame), step), LAYOUT)
    assert evidence.objection(order("halt", onset_step=steps - 10, tensors=["a:input"])) is not None
