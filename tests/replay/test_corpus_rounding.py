"""What makes recorded frames small changes no number by more than is said."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bench.record_rounding import AFTER, BEFORE, EVERY, MANTISSA_BITS, round_counts, round_floats, rounded
from fp8watch import columns
from fp8watch.records import StepFrame

BITS = MANTISSA_BITS["amax"]


@given(st.lists(st.floats(width=32), min_size=1))
def test_floats_keep_their_leading_bits_and_what_is_special(values: list[float]) -> None:
    exact = np.array(values, np.float32)
    near = round_floats(exact, BITS)
    special = ~np.isfinite(exact) | (exact == 0)
    assert np.array_equal(near[special], exact[special], equal_nan=True)
    ordinary = np.isfinite(exact) & (np.abs(exact) > 1e-30)
    wide, close = exact[ordinary].astype(np.float64), near[ordinary].astype(np.float64)
    assert (np.abs(close / wide - 1) <= 2.0**-BITS).all()


@given(st.lists(st.integers(0, 2**52), min_size=1))
def test_counts_keep_their_leading_bits_and_zero(values: list[int]) -> None:
    exact = np.array(values, np.uint64)
    near = round_counts(exact)
    assert ((near == 0) == (exact == 0)).all()
    assert np.array_equal(near[exact < 256], exact[exact < 256])
    assert (np.abs(near.astype(np.float64) - exact) <= exact * 2.0**-8).all()


def frame(step: int) -> StepFrame:
    held = {
        "amax": columns.pack(np.array([3.3, np.inf], np.float32), "f4"),
        "scale": columns.pack(np.array([1.1, 2.0], np.float32), "f4", np.array([True, False])),
        "quantized": columns.pack(np.array([64, 64], np.uint64), "u8"),
        "mse": columns.pack(np.array([1.0, 2.0], np.float32), "f4"),
    }
    held["amax_last"] = held["amax"]
    scalars = {"loss": 2.123456789, "overhead_seconds": 0.1, "grad_norm": float("nan"), "samples": 16777217.0}
    return StepFrame(
        run="r", attempt=0, rank=0, step=step, layout_id=1, time_unix=5.0, scalars=scalars, columns=held
    )  # fmt: skip


def test_what_is_left_out_is_absent_and_never_zero() -> None:
    kept = rounded(frame(EVERY + 1), None)
    assert set(kept.columns) == {"amax", "scale"}
    assert set(kept.scalars) == {"loss", "grad_norm", "samples"}
    assert np.isnan(kept.scalars["grad_norm"])
    assert kept.scalars["samples"] == 16777217.0
    values, valid = columns.unpack(kept.columns["scale"])
    assert valid.tolist() == [True, False]
    assert abs(values[0] / 1.1 - 1) < 2.0 ** -MANTISSA_BITS["scale"]
    assert columns.unpack(kept.columns["amax"])[0][1] == np.inf


def test_a_last_amax_of_its_own_is_kept() -> None:
    own = columns.pack(np.array([1.0, 2.0], np.float32), "f4")
    original = frame(1)
    held = msgspec.structs.replace(original, columns=original.columns | {"amax_last": own})
    assert "amax_last" in rounded(held, None).columns


def test_element_counts_are_kept_on_sampled_steps_and_around_the_fault() -> None:
    fault = 1001
    near = range(fault - BEFORE, fault + AFTER + 1)
    for step in (*range(980, 1030), fault + AFTER, fault + AFTER + 1):
        assert ("quantized" in rounded(frame(step), fault).columns) == (step in near or step % EVERY == 0)
