"""Rows of exact zeros: a scale without a floor becomes infinite, and the finding says whose and why at once."""

from __future__ import annotations

import numpy as np
import pytest
from detect_runs import findings
from hypothesis import given
from hypothesis import strategies as st

from fp8watch.detect.base import Sample
from fp8watch.detect.nonfinite import VANISHING
from fp8watch.formats import FORMATS
from fp8watch.records import TensorColumn

TENSORS = tuple(
    TensorColumn(module=f"blocks.0.attention.{name}", tensor="input", block="0", fp8_format="e4m3", recipe="current")
    for name in ("qkv", "lora_b", "proj")
)


def sample(step: int, amax: list[float], scale: list[float], valid: list[bool] | None = None) -> Sample:
    seen = {} if valid is None else {"amax": np.array(valid), "scale": np.array(valid)}
    values = {"amax": np.array(amax, np.float32), "scale": np.array(scale, np.float32)}
    return Sample(attempt=0, step=step, scalars={"loss": 2.0}, tensors=TENSORS, values=values, valid=seen)


def without_floor(amax: float) -> float:
    with np.errstate(all="ignore"):
        return float(np.float32(FORMATS["e4m3"].max) / np.float32(amax))


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-39])
def test_the_module_and_the_reason_are_named_in_the_first_step(amax: float) -> None:  # case: NUM-09
    (found,) = findings([sample(1, [1.0, amax, 2.0], [448.0, without_floor(amax), 224.0])])
    assert (found.detector, found.severity, found.step) == ("nonfinite", "act", 1)
    assert (found.layer, found.tensor) == ("blocks.0.attention.lora_b", "blocks.0.attention.lora_b:input")
    assert found.evidence["nonfinite_scale"] == ["blocks.0.attention.lora_b:input"]
    assert found.evidence["vanishing_amax"] == ["blocks.0.attention.lora_b:input"]
    assert found.cause == "bookkeeping"
    assert any("no floor" in reason for reason in found.evidence["for"])


def test_exact_zeros_with_a_floored_scale_are_how_an_adapter_starts() -> None:  # case: NUM-09
    floored = without_floor(1e-12)
    assert findings([sample(step, [1.0, 0.0, 2.0], [448.0, floored, 224.0]) for step in range(1, 40)]) == []


def test_an_infinite_amax_is_another_matter() -> None:
    (found,) = findings([sample(1, [1.0, np.inf, 2.0], [448.0, np.nan, 224.0])])
    assert found.evidence["nonfinite_scale"] == ["blocks.0.attention.lora_b:input"]
    assert "vanishing_amax" not in found.evidence
    assert found.cause == "unknown"


def test_what_was_not_observed_is_not_named() -> None:
    assert findings([sample(1, [1.0, 0.0, 2.0], [448.0, np.inf, 224.0], valid=[True, False, True])]) == []


@given(st.floats(0, 2.0**-100, width=32), st.sampled_from(sorted(FORMATS)))
def test_what_overflows_the_scale_counts_as_vanishing(amax: float, fmt: str) -> None:
    with np.errstate(all="ignore"):
        scale = np.float32(FORMATS[fmt].max) / np.float32(amax)
    if not np.isfinite(scale):
        assert amax < VANISHING
