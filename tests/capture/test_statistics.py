from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8watch.capture.statistics import COUNTS, Item, count, count_many
from fp8watch.capture.statistics.count import count_by_torch, format_of
from fp8watch.emulation.cast import measure_amax, to_float8
from fp8watch.emulation.statistics import quantize_and_count
from fp8watch.formats import E4M3, E5M2

FINITE = st.floats(-(2.0**100), 2.0**100, width=32)
ANY = st.one_of(FINITE, st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan]))
FORMATS = st.sampled_from([E4M3, E5M2])


@given(st.lists(ANY, max_size=40), st.floats(2.0**-40, 2.0**40, width=32), FORMATS)
def test_counts_are_those_of_the_real_cast(values, scale, fmt):
    x, factor = torch.tensor(values), torch.tensor(scale)
    found = count(x, factor, fmt)
    codes = to_float8(x, factor, fmt).float()
    scaled = x * factor
    assert found.quantized.item() == len(values)
    assert found.saturated.item() == (scaled.abs() > fmt.max).sum().item()
    assert found.zeros.item() == (x == 0).sum().item()
    assert found.nonfinite.item() == (~torch.isfinite(x)).sum().item()
    assert found.underflowed.item() == ((codes == 0) & (x != 0)).sum().item()
    assert found.amax.item() == max((abs(v) for v in x.tolist() if not math.isnan(v)), default=0.0)
    assert all(getattr(found, name).dtype == torch.int64 for name in (*COUNTS, "zeros"))


@given(st.lists(ANY, max_size=40), st.floats(2.0**-40, 2.0**40, width=32), FORMATS)
def test_counts_are_those_of_the_emulated_cast_to_the_bit(values, scale, fmt):
    x, factor = torch.tensor(values), torch.tensor(scale)
    _, emulated = quantize_and_count(x, factor, fmt, measure_amax(x))
    found = count(x, factor, fmt)
    for name in COUNTS:
        assert torch.equal(getattr(found, name), getattr(emulated, name))
    assert torch.equal(found.squared_error, emulated.squared_error) or found.squared_error.isnan()


@given(st.integers(1, 5), st.integers(1, 9), st.sampled_from([0, 1]), FORMATS)
def test_a_scale_a_row_or_column_counts_each_as_its_own(rows, length, dim, fmt):
    generator = torch.Generator().manual_seed(rows * 10 + length)
    x = torch.randn(rows, length, generator=generator)
    x *= 10.0 ** torch.empty(x.shape).uniform_(-9, 3, generator=generator)
    scale = fmt.max / x.abs().amax(dim, keepdim=True) * 1.5
    found = count(x, scale, fmt)
    parts = [
        count(part.clone(), one.reshape(()), fmt) for part, one in zip(x.unbind(1 - dim), scale.flatten(), strict=True)
    ]
    for name in (*COUNTS, "zeros"):
        assert getattr(found, name) == sum(getattr(part, name) for part in parts)
    assert found.squared_error.item() == pytest.approx(sum(p.squared_error.item() for p in parts), rel=1e-4)


@given(st.lists(FINITE, min_size=1, max_size=40), FORMATS)
def test_codes_that_were_really_made_are_counted_alike(values, fmt):
    x = torch.tensor(values)
    scale = torch.tensor(0.37)
    codes = to_float8(x, scale, fmt)
    made = count_by_torch(Item(values=x, scale=scale, fmt=fmt, codes=codes.view(torch.uint8)))
    thought = count(x, scale, fmt)
    for name in (*COUNTS, "zeros"):
        assert torch.equal(getattr(made, name), getattr(thought, name))


def test_a_cast_that_lost_more_shows_it():
    x = torch.full((8,), 1e-3)
    codes = torch.zeros(8, dtype=torch.uint8)
    item = Item(values=x, scale=torch.tensor(1e5), fmt=E4M3, codes=codes)
    assert count_by_torch(item).underflowed == 8
    assert count(x, torch.tensor(1e5), E4M3).underflowed == 0


def test_derived_figures():
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    found = count(x, E4M3.max / x.abs().max(), torch.float8_e4m3fn)
    assert found.snr.item() == pytest.approx(31.5, abs=0.5)  # E4M3, a tensor, Gauss
    assert found.crest.item() == pytest.approx((x.abs().max() / x.square().mean().sqrt()).item(), rel=1e-5)
    assert found.mse.item() == pytest.approx(x.square().mean().item() / 10**3.15, rel=0.2)
    assert format_of(torch.float8_e5m2) is E5M2
    with pytest.raises(KeyError):
        format_of(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_and_layouts(dtype):
    x = torch.randn(6, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    scale = torch.tensor(100.0)
    for view in (x.t(), x[:, ::2], x[:0]):
        found, flat = count(view, scale, E4M3), count(view.float().contiguous(), scale, E4M3)
        for name in (*COUNTS, "zeros"):
            assert getattr(found, name) == getattr(flat, name)


def test_many_at_once_are_each_their_own():
    items = [
        Item(values=torch.randn(n, generator=torch.Generator().manual_seed(n)) * n, scale=torch.tensor(90.0), fmt=fmt)
        for n in (1, 10, 300)
        for fmt in (E4M3, E5M2)
    ]
    for item, found in zip(items, count_many(items), strict=True):
        alone = count(item.values, item.scale, item.fmt)
        assert all(torch.equal(getattr(found, name), getattr(alone, name)) for name in COUNTS)
    assert count_many([]) == []


NO_NUMBERS = st.sampled_from([math.nan, math.inf, -math.inf, 0.0])


@given(st.lists(ANY, min_size=1, max_size=40), NO_NUMBERS, FORMATS)
def test_a_scale_that_is_no_number_never_makes_a_negative_count(values, scale, fmt):
    """Times NaN or infinity, a zero is NaN: it was zero before and is not after."""
    x, factor = torch.tensor([*values, 0.0]), torch.tensor(scale)
    codes = to_float8(x, factor, fmt)
    for found in (
        count(x, factor, fmt),
        count(x.reshape(1, -1), factor.expand(1, len(x)), fmt),
        count_by_torch(Item(values=x, scale=factor, fmt=fmt, codes=codes.view(torch.uint8))),
    ):
        assert found.underflowed.item() == ((codes.float() == 0) & (x != 0)).sum().item()
        assert all(getattr(found, name).item() >= 0 for name in (*COUNTS, "zeros"))
        assert found.zeros.item() == (x == 0).sum().item()


def test_one_nan_in_a_tensor_does_not_turn_its_zeros_into_minus_underflow():
    """Dynamic scaling makes a scale of NaN from it, and all codes are NaN."""
    x = torch.relu(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
    x[0, 0] = math.nan
    found = count(x, E4M3.max / x.abs().max(), E4M3)
    assert (found.underflowed.item(), found.nonfinite.item()) == (0, 1)


def test_a_negative_scale_saturates_like_its_magnitude():
    x = torch.tensor([1.0, -1.0, 0.25])
    for name in COUNTS:
        assert getattr(count(x, torch.tensor(-600.0), E4M3), name) == getattr(count(x, torch.tensor(600.0), E4M3), name)
    assert count(x, torch.tensor(-600.0), E4M3).saturated == 2
