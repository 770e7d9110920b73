"""What amax alone predicts for other recipes, and when a candidate is worth having."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8watch.formats import E4M3, E4M3_FNUZ, E5M2, FORMATS, expected_gemm_error
from fp8watch.what_if import CANDIDATES, COLUMNS, GAUSS_CREST, Comparison, Loss, predict

FINE = Loss(underflow=1e-5, saturation=0.0, snr_db=31.5)
CLIPPED = Loss(underflow=1e-5, saturation=0.18, snr_db=11.6)


@pytest.mark.parametrize(
    ("ratio", "snr_db", "clipped"),
    [(1.25, 31.5, 2e-5), (1.5, 31.3, 3.5e-4), (2, 27.0, 0.0075), (4, 11.6, 0.18), (8, 5.2, 0.50), (16, 2.5, 0.74)],
)
def test_a_stale_scale_costs_what_simulated_normal_tensors_lose(ratio, snr_db, clipped):
    found = predict(E4M3.max * ratio, 1.0, E4M3)["as_is"]
    assert found.snr_db == pytest.approx(snr_db, abs=0.25)
    assert found.saturation == pytest.approx(clipped, rel=0.15)


def test_a_scale_far_too_small_costs_its_underflow():
    rng = np.random.default_rng(0)
    scaled = rng.standard_normal(1 << 20) * 2.0**-9 / GAUSS_CREST * 8
    kept = np.where(np.abs(scaled) < E4M3.min_normal, np.round(scaled / 2.0**-9) * 2.0**-9, scaled)
    found = predict(8 * 2.0**-9, 1.0, E4M3)["as_is"]
    assert found.underflow == pytest.approx(np.mean((kept == 0) & (scaled != 0)), rel=0.03)
    assert found.snr_db == pytest.approx(10 * np.log10(np.sum(scaled**2) / np.sum((scaled - kept) ** 2)), abs=0.5)
    assert found.saturation == 0


@given(st.floats(1e-30, 1e30), st.floats(1e-6, 1e6), st.sampled_from(list(FORMATS.values())))
def test_predictions_are_shares_and_head_room_only_helps_against_clipping(amax, scale, fmt):
    found = predict(amax, scale, fmt)
    assert set(found) == {"as_is", *CANDIDATES}
    for loss in found.values():
        assert 0 <= loss.underflow <= 1
        assert 0 <= loss.saturation <= 1
        assert loss.snr_db <= fmt.cast_snr_db + 6
    assert found["margin_2"].saturation <= found["margin_1"].saturation <= found["as_is"].saturation
    assert found["margin_2"].underflow >= found["as_is"].underflow
    assert found["current"].is_ordinary(fmt)


@pytest.mark.parametrize("values", [(0.0, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, 0.0)])
def test_without_a_usable_amax_nothing_is_predicted(values):
    assert predict(*values, E4M3) == {}


def compared(as_is: Loss, fmt=E4M3, **under: Loss) -> Comparison:
    return Comparison(step=5, as_is=as_is, under={name: under.get(name, as_is) for name in CANDIDATES}, fmt=fmt)


def test_gain():
    assert FINE.gains_over(CLIPPED)
    assert not CLIPPED.gains_over(FINE)
    assert not FINE.gains_over(FINE)
    assert compared(CLIPPED, margin_1=Loss(underflow=0, saturation=0.0075, snr_db=27.0)).margin_helps(1.0)
    assert not compared(CLIPPED, margin_2=FINE).margin_helps(1.0)  # it is the other one that would help
    assert compared(CLIPPED, margin_2=FINE).margin_helps(2.0)
    assert compared(CLIPPED).bf16_helps()
    assert not compared(FINE).bf16_helps()
    assert compared(Loss(underflow=0.4, saturation=0.0, snr_db=31.0)).bf16_helps()  # many lost, the sum undisturbed
    assert not compared(Loss(underflow=0.0, saturation=0.0, snr_db=25.0), fmt=E5M2).bf16_helps()
    assert compared(Loss(underflow=0.0, saturation=0.0, snr_db=25.0), fmt=E4M3_FNUZ).bf16_helps()


def test_evidence_is_plain_and_finite():
    nothing = Loss(underflow=0.0, saturation=0.0, snr_db=math.inf)
    assert nothing.as_evidence() == {"underflow": 0.0, "saturation": 0.0}
    assert compared(CLIPPED).as_evidence()["as_is"] == {"underflow": 1e-5, "saturation": 0.18, "snr_db": 11.6}
    assert len(COLUMNS) == 15


def test_the_expected_error_of_a_gemm_is_that_of_a_simulated_one():
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((256, 512)), rng.standard_normal((512, 256))

    def cast(values: np.ndarray, fmt) -> np.ndarray:
        scale = fmt.max / np.abs(values).max()
        scaled = values * scale
        step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(scaled), fmt.min_normal))) - fmt.mantissa_bits)
        return np.round(scaled / step) * step / scale

    for first, second in ((E4M3, E4M3), (E4M3, E5M2)):
        y = cast(x, first) @ cast(w, second)
        error = np.linalg.norm(y - x @ w) / np.linalg.norm(x @ w)
        assert expected_gemm_error(first, second) == pytest.approx(error, rel=0.05)
