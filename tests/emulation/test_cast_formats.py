"""The cast against the formats' definition, not against torch alone: codes are decoded here by hand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8watch.emulation.cast import measure_amax, quantize, to_float8
from fp8watch.emulation.statistics import quantize_and_count
from fp8watch.formats import E4M3, E5M2, Fp8Format

BOTH = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
ONE = torch.tensor(1.0)
FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
FORMATS = st.sampled_from([E4M3, E5M2])


def decode(code: int, fmt: Fp8Format) -> float:
    """The value of a byte by arXiv 2209.05433: E4M3 has no infinity and one NaN, E5M2 is IEEE-like."""
    bits = fmt.mantissa_bits
    exponent_bits = 7 - bits
    bias = 2 ** (exponent_bits - 1) - 1
    sign = -1.0 if code & 0x80 else 1.0
    exponent = (code & 0x7F) >> bits
    mantissa = code & (2**bits - 1)
    top = 2**exponent_bits - 1
    if exponent == top and fmt is E5M2:
        return math.nan if mantissa else sign * math.inf
    if exponent == top and mantissa == 2**bits - 1:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - bits)
    return sign * (1 + mantissa / 2**bits) * 2.0 ** (exponent - bias)


def finite_codes(fmt: Fp8Format) -> list[float]:
    return [value for value in (decode(code, fmt) for code in range(256)) if math.isfinite(value)]


def nearest(value: float, fmt: Fp8Format) -> float:
    """Round to nearest, ties to the even code, saturating, in exact double arithmetic."""
    magnitudes = sorted({abs(v) for v in finite_codes(fmt)})
    magnitude = min(abs(value), fmt.max)
    above = next(i for i, m in enumerate(magnitudes) if m >= magnitude)
    below = max(above - 1, 0) if magnitudes[above] != magnitude else above
    low, high = magnitudes[below], magnitudes[above]
    if magnitude - low == high - magnitude:  # neighbours in order of code: the even index is the even code
        chosen = low if below % 2 == 0 else high
    else:
        chosen = low if magnitude - low < high - magnitude else high
    return math.copysign(chosen, value)


def cast_one(value: float, fmt: Fp8Format, scale: float = 1.0) -> float:
    return float(quantize(torch.tensor([value]), torch.tensor(scale), fmt)[0])


@BOTH
def test_every_finite_code_is_kept(fmt: Fp8Format) -> None:
    codes = torch.tensor(finite_codes(fmt))
    assert len(codes) == (254 if fmt is E4M3 else 248)
    assert torch.equal(quantize(codes, ONE, fmt), codes)
    assert torch.equal(to_float8(codes, ONE, fmt).float(), codes)
    assert float(codes.max()) == fmt.max
    assert float(codes[codes > 0].min()) == fmt.min_subnormal


@BOTH
def test_every_boundary_between_codes(fmt: Fp8Format) -> None:
    magnitudes = sorted({abs(v) for v in finite_codes(fmt)})
    ties = torch.tensor([(low + high) / 2 for low, high in itertools.pairwise(magnitudes)])
    probes = torch.cat([ties, torch.nextafter(ties, torch.tensor(0.0)), torch.nextafter(ties, torch.tensor(1e9))])
    probes = torch.cat([probes, -probes])
    expected = torch.tensor([nearest(float(v), fmt) for v in probes])
    assert torch.equal(quantize(probes, ONE, fmt), expected)
    assert torch.equal(to_float8(probes, ONE, fmt).float(), expected)


@settings(deadline=None)
@given(value=FLOATS, fmt=FORMATS)
def test_any_value_is_the_nearest_code(value: float, fmt: Fp8Format) -> None:
    got = cast_one(value, fmt)
    assert math.isnan(got) if math.isnan(value) else got == nearest(value, fmt)


@settings(deadline=None)
@given(values=st.lists(FLOATS, min_size=1, max_size=40), scale=st.floats(2.0**-40, 2.0**40, width=32), fmt=FORMATS)
def test_arithmetic_and_torch_dtype_agree(values: list[float], scale: float, fmt: Fp8Format) -> None:
    tensor, factor = torch.tensor(values), torch.tensor(scale)
    assert torch.equal(
        quantize(tensor, factor, fmt).nan_to_num(nan=-1e9), to_float8(tensor, factor, fmt).float().nan_to_num(nan=-1e9)
    )


@BOTH
def test_saturation_infinity_and_nan(fmt: Fp8Format) -> None:
    wild = torch.tensor([7e4, -7e4, math.inf, -math.inf, 3e38, math.nan])
    for cast in (quantize(wild, ONE, fmt), to_float8(wild, ONE, fmt).float()):
        assert cast[:5].tolist() == [fmt.max, -fmt.max, fmt.max, -fmt.max, fmt.max]
        assert cast[5].isnan()


@BOTH
def test_underflow_begins_at_the_ratio_formats_states(fmt: Fp8Format) -> None:
    amax = 3.0
    scale = fmt.max / amax
    edge = amax * fmt.underflow_ratio
    assert cast_one(edge * (1 - 1e-6), fmt, scale) == 0.0
    assert cast_one(edge * (1 + 1e-6), fmt, scale) != 0.0
    assert cast_one(fmt.min_subnormal / 2, fmt) == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_input_is_scaled_in_float32(dtype: torch.dtype) -> None:
    values, scale = torch.randn(64).to(dtype), torch.tensor(3.3)
    assert torch.equal(quantize(values, scale, E4M3), quantize(values.float(), scale, E4M3))


def test_strides_do_not_matter() -> None:
    values = torch.randn(16, 24)
    assert torch.equal(quantize(values.t(), ONE, E4M3), quantize(values, ONE, E4M3).t())


@settings(deadline=None)
@given(values=st.lists(FLOATS, max_size=40))
def test_amax_ignores_nan_and_keeps_infinity(values: list[float]) -> None:
    expected = max((abs(v) for v in values if not math.isnan(v)), default=0.0)
    assert float(measure_amax(torch.tensor(values))) == expected


@settings(deadline=None)
@given(values=st.lists(FLOATS, min_size=1, max_size=60), scale=st.floats(2.0**-20, 2.0**20, width=32), fmt=FORMATS)
def test_counting_counts_and_casts_the_same(values: list[float], scale: float, fmt: Fp8Format) -> None:
    tensor, factor = torch.tensor(values), torch.tensor(scale)
    codes, counted = quantize_and_count(tensor, factor, fmt, measure_amax(tensor))
    plain = quantize(tensor, factor, fmt)
    assert torch.equal(codes.nan_to_num(nan=-1e9), plain.nan_to_num(nan=-1e9))
    assert int(counted.quantized) == len(values)
    assert int(counted.saturated) == int(((tensor * factor).abs() > fmt.max).sum())
    assert int(counted.underflowed) == int(((tensor != 0) & (plain == 0)).sum())
    assert int(counted.nonfinite) == sum(not math.isfinite(v) for v in values)


def test_error_of_a_gaussian_is_the_textbook_snr() -> None:
    """31.5 dB for E4M3 scaled to full range (numerics table, 4.2 million samples)."""
    values = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    amax = measure_amax(values)
    _, counted = quantize_and_count(values, 448.0 / amax, E4M3, amax)
    assert float(10 * torch.log10(counted.squared_values / counted.squared_error)) == pytest.approx(31.5, abs=0.3)
