"""Closer looks in the controller: kept, asked for, shown as evidence, and forgotten with their timeline."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fp8watch import columns, what_if, wire
from fp8watch.controller.closer import MIN_STEPS_APART, CloserLooks
from fp8watch.controller.merge import merge
from fp8watch.controller.run import RunPilot
from fp8watch.detect.base import Sample
from fp8watch.detect.pipeline import Pipeline
from fp8watch.policy import load as load_policy
from fp8watch.records import Finding, Hello, Inquiry, Layout, StepFrame, TensorColumn

TENSORS = ("fc:input", "fc:weight", "fc:grad_output")


def layout(rank: int = 0) -> Layout:
    described = [
        TensorColumn(module="fc", tensor=name.partition(":")[2], block="fc", fp8_format="e4m3") for name in TENSORS
    ]
    return Layout(run="r", attempt=0, rank=rank, layout_id=0, columns=described, expected_modules=1, observed_modules=1)


def frame(step: int, *, rank: int = 0, is_close: bool = False, scale: float = 1.0, saturated: int = 0) -> StepFrame:
    """amax 448 in E4M3; with `scale` 4 it clips; `is_close`: with what-if figures that margin 2 mends."""
    made: dict[str, Any] = {
        "amax": ("f4", [448.0] * 3), "scale": ("f4", [scale] * 3), "quantized": ("u8", [1000] * 3),
        "saturated": ("u8", [saturated] * 3), "underflowed": ("u8", [1] * 3), "snr": ("f4", [12.0] * 3),
    }  # fmt: skip
    if is_close:
        for name in what_if.CANDIDATES:
            is_mended = name != "margin_1"
            made[what_if.column(name, "underflowed")] = ("u8", [1] * 3)
            made[what_if.column(name, "saturated")] = ("u8", [0 if is_mended else saturated // 4] * 3)
            made[what_if.column(name, "snr")] = ("f4", [31.5 if is_mended else 20.0] * 3)
        made["shadow_error"] = ("f4", [0.3, 0.0, 0.0])
    valid = {"shadow_error": np.array([True, False, False])}
    packed = {name: columns.pack(np.array(values), dtype, valid.get(name)) for name, (dtype, values) in made.items()}
    return StepFrame(
        run="r", attempt=0, rank=rank, step=step, layout_id=0, time_unix=0.0, scalars={"loss": 2.0}, columns=packed
    )


def sample(*frames: StepFrame) -> Sample:
    return merge(list(frames), {(f.rank, 0): layout(f.rank) for f in frames})


def finding(step: int = 9, **more: Any) -> Finding:
    fields: dict[str, Any] = {
        "id": "f", "run": "r", "attempt": 0, "step": step, "onset_step": step - 1, "detector": "saturation",
        "severity": "act", "cause": "precision", "tensor": "fc:input", "layer": "fc", "layers": ["fc"], "incident": "i",
    }  # fmt: skip
    return Finding(**fields | more)


def test_figures_are_kept_by_name_and_merged_over_ranks():
    book = CloserLooks()
    book.take(sample(frame(7)))
    assert book.comparisons == {}
    # Rank 1 has thinned its sampling: its step holds no figures and does not dilute those of rank 0.
    book.take(sample(frame(8, is_close=True, saturated=200), frame(8, rank=1, is_close=True, saturated=100)))
    assert set(book.comparisons) == set(TENSORS)
    found = book.comparisons["fc:input"]
    assert found.step == 8
    assert found.as_is.saturation == pytest.approx(0.15)
    assert found.under["margin_1"].saturation == pytest.approx(75 / 2000)
    assert found.under["current"].saturation == 0
    assert found.margin_helps(1.0)
    assert found.bf16_helps()
    assert book.shadow_errors == {"fc": (8, pytest.approx(0.3))}
    book.rewind()
    assert not book.comparisons
    assert not book.shadow_errors


def test_a_finding_shows_what_was_seen_since_its_onset_else_what_amax_predicts():
    book = CloserLooks()
    clipping = frame(9, scale=4.0)
    predicted = book.with_closer_look(finding(), sample(clipping)).evidence["what_if_predicted"]
    assert predicted["as_is"]["saturation"] == pytest.approx(0.18, abs=0.01)  # four times too large
    assert predicted["margin_2"]["saturation"] < 1e-4
    book.take(sample(frame(8, is_close=True, saturated=200)))
    seen = book.with_closer_look(finding(), sample(clipping)).evidence
    assert seen["what_if"]["step"] == 8
    assert seen["what_if"]["as_is"]["saturation"] == 0.2
    assert seen["shadow_error"] == pytest.approx(0.3)
    stale = book.with_closer_look(finding(onset_step=9), sample(clipping)).evidence
    assert "what_if" not in stale
    assert "what_if_predicted" in stale
    assert book.with_closer_look(finding(cause="data"), sample(clipping)).evidence == {}


def test_an_incident_is_asked_about_once_and_inquiries_keep_their_distance():
    book = CloserLooks()
    first = book.inquiry("r", 0, [finding()], seen=9)
    assert first == Inquiry(run="r", attempt=0, step=9, modules=["fc"])
    assert book.inquiry("r", 0, [finding(incident="j")], seen=9 + MIN_STEPS_APART - 1) is None
    assert book.inquiry("r", 0, [finding()], seen=9 + MIN_STEPS_APART) is None  # the same incident
    assert book.inquiry("r", 0, [finding(incident="j")], seen=9 + MIN_STEPS_APART) is not None
    for other in (finding(incident="k", cause="hardware"), finding(incident="l", layers=[]),
                  finding(incident="m", layers=[str(i) for i in range(9)])):  # fmt: skip
        assert book.inquiry("r", 0, [other], seen=500) is None


def test_the_controller_asks_when_a_cast_clips_and_the_ranks_get_it_over_the_wire():
    hello = Hello(
        wire_version=1, run="r", attempt=0, rank=0, local_rank=0, world_size=1, pid=1, host="h", time_unix=0.0, step=0
    )
    pilot = RunPilot(hello, load_policy("observe"), term=1, clock=lambda: 0.0, pipeline=Pipeline("r"))
    pilot.hello(hello)
    pilot.layout(layout())
    for step in range(1, 40):
        is_bad = step >= 30
        pilot.frame(frame(step, scale=8.0 if is_bad else 1.0, saturated=500 if is_bad else 0, is_close=step == 33))
    asked = [reply for reply in pilot.replies if isinstance(reply, Inquiry)]
    assert len(asked) == 1
    assert asked[0].modules == ["fc"]
    assert wire.unpack_reply(wire.pack(asked[0])) == asked[0]
    found = [record for record in pilot.records if isinstance(record, Finding)]
    assert any("what_if_predicted" in record.evidence or "what_if" in record.evidence for record in found)
