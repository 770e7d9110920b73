"""Losses of the surviving timeline, and the object that the demo ends with."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from fp8watch.demo import result
from fp8watch.demo.plan import make_plan
from fp8watch.demo.plot import Curve, Marker, plot
from fp8watch.demo.processes import FINAL_STEPS, Losses
from fp8watch.demo.story import Story
from fp8watch.records import ActionRecord, Finding

FLOATS = st.floats(allow_nan=True, allow_infinity=True)


def losses(values: list[float]) -> Losses:
    made = Losses()
    for step, value in enumerate(values, start=1):
        made.add(step, value)
    return made


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_a_rollback_replaces_the_steps_it_undid(targets: list[int]) -> None:
    made, last, replayed, value = Losses(), 0, 0, 0.0
    expected: dict[int, float] = {}
    for target in targets:  # each attempt begins where the last one was rolled back to, and gets to `target`
        start = min(last, target // 2)
        replayed += last - start
        expected = {step: loss for step, loss in expected.items() if step <= start}
        for step in range(start + 1, target + 1):
            value += 1.0
            made.add(step, value)
            expected[step] = value
        last = target
    assert made.series() == sorted(expected.items())
    assert made.num_replayed == replayed


def test_the_final_loss_is_the_mean_of_the_last_20() -> None:
    assert losses([100.0] * 10 + [2.0] * 10 + [4.0] * 10).final(30) == 3.0


def test_a_loss_that_is_missing_or_not_finite_has_no_mean() -> None:
    assert losses([1.0] * 30).final(31) is None
    assert losses([1.0] * 29 + [math.nan]).final(30) is None
    assert losses([1.0] * 29 + [math.inf]).final(30) is None
    assert losses([math.nan] + [1.0] * FINAL_STEPS).final(FINAL_STEPS + 1) == 1.0


def test_the_object_separates_what_was_done_from_what_was_proposed() -> None:
    def action(name: str, **fields: object) -> ActionRecord:
        return ActionRecord(
            id=name, run="r", attempt=0, action="hold_lr", params={}, rule="x", finding="f", decided_step=3, **fields
        )

    story = Story(
        findings=[
            Finding(
                id="f", run="r", attempt=0, step=5, onset_step=4, detector="nonfinite", severity="act",
                cause="precision", evidence={"loss": math.nan},
            )
        ],
        actions=[
            action("done", applied_step=4, readback="ok", status="applied", mode="auto"),
            action("not-visible", applied_step=4, readback="pending", status="applied", mode="auto"),
            action("proposed", status="proposed"),
        ],
    )  # fmt: skip
    plan = make_plan(scenario="nan-loss", steps=20)
    made = result.as_json(
        plan, story, watched=losses([2.0] * 20), twin=losses([1.0] * 20), unwatched=None, ended="completed"
    )
    json.dumps(made, allow_nan=False)
    assert [entry["id"] for entry in made["actions"]] == ["done"]
    assert [entry["id"] for entry in made["proposed"]] == ["proposed"]
    assert made["findings"][0]["evidence"] == {"loss": "nan"}
    assert (made["final_loss"], made["twin_final_loss"], made["unwatched_final_loss"]) == (2.0, 1.0, None)


@given(
    st.lists(st.lists(FLOATS, max_size=40), max_size=3),
    st.integers(1, 60),
    st.integers(10, 60),
    st.integers(1, 12),
)
def test_the_plot_takes_any_losses(series: list[list[float]], last_step: int, width: int, height: int) -> None:
    curves = [Curve(points=list(enumerate(values, start=1)), colour="red") for values in series]
    text = plot(curves, last_step=last_step, width=width, height=height, markers=[Marker(step=1, colour="blue")])
    assert len(text.plain.split("\n")) == max(2, height)


def test_the_plot_falls_where_the_losses_fall() -> None:
    falling = Curve(points=[(step, 10.0 - step / 10) for step in range(1, 101)], colour="red")
    rows = plot([falling], last_step=100, width=47, height=4).plain.split("\n")
    first, last = rows[0][7:], rows[-1][7:]
    blank = chr(0x2800)
    assert first.rstrip(blank) != ""
    assert last.lstrip(blank) != ""
    assert len(first.rstrip(blank)) < len(last) - len(last.lstrip(blank))
