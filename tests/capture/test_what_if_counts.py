"""What a tensor would lose under other recipes, compared with real float8 casts, tile by tile."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fp8watch.capture.statistics import Item, count
from fp8watch.capture.statistics.what_if import current_scale, tile_scale, what_if, what_if_many
from fp8watch.emulation.cast import measure_amax, to_float8
from fp8watch.formats import E4M3, E5M2
from fp8watch.what_if import CANDIDATES, TILE

ANY = st.one_of(st.floats(-(2.0**100), 2.0**100, width=32), st.sampled_from([0.0, math.inf, -math.inf, math.nan]))
FORMATS = st.sampled_from([E4M3, E5M2])


def by_hand(x: torch.Tensor, scale: float, fmt) -> tuple[int, int, float]:
    """Underflowed, saturated and squared error of a real float8 cast."""
    codes = to_float8(x, torch.tensor(scale), fmt).float()
    error = ((x * scale - codes) / scale).double().square().sum().item()
    return ((codes == 0) & (x != 0)).sum().item(), (x.mul(scale).abs() > fmt.max).sum().item(), error


def tiles_by_hand(x: torch.Tensor, length: int) -> tuple[int, int, float]:
    total = [0, 0, 0.0]
    for row in x.reshape(-1, x.shape[-1]):
        for tile in row.split(length):
            amax = max((abs(v) for v in tile.tolist() if not math.isnan(v)), default=0.0)
            scale = 1.0
            if 0 < amax < math.inf:
                scale = 2.0 ** max(-126, min(127, math.floor(math.log2(448.0) - math.log2(amax))))
                if amax * scale > 448:  # log2 rounded the wrong way
                    scale /= 2
            total = [a + b for a, b in zip(total, by_hand(tile, scale, E4M3), strict=True)]
    return tuple(total)


@given(st.lists(ANY, min_size=1, max_size=300), st.floats(2.0**-30, 2.0**30, width=32), FORMATS)
@example([918547140182016.0], 1073740032.0, E4M3)  # its error in units of the code has no finite square
def test_every_candidate_is_counted_as_its_real_cast_would_be(values, scale, fmt):
    x = torch.tensor(values)
    found = what_if(Item(values=x, scale=torch.tensor(scale), fmt=fmt))
    amax = measure_amax(x).item()
    own = current_scale(measure_amax(x), fmt).item()
    expected = [
        by_hand(x, scale / 2, fmt),
        by_hand(x, scale / 4, fmt),
        by_hand(x, own, fmt),
        tiles_by_hand(x, 128),
        tiles_by_hand(x, 32),
    ]
    assert found.underflowed.tolist() == [row[0] for row in expected]
    assert found.saturated.tolist() == [row[1] for row in expected]
    if math.isfinite(amax) and not x.isnan().any() and amax < 1e15:
        for ours, (_, _, error) in zip(found.squared_error.tolist(), expected, strict=True):
            assert ours == pytest.approx(error, rel=1e-3, abs=1e-30)


@given(st.floats(2.0**-149, 2.0**127, width=32))
def test_a_tile_scale_is_the_largest_power_of_two_that_does_not_clip(amax):
    scale = tile_scale(torch.tensor([[amax, -amax / 2]])).item()
    assert math.frexp(scale)[0] == 0.5
    if amax > 2.0**-118:
        assert amax * scale <= 448 < amax * scale * 2
    else:
        assert scale == 2.0**127  # the largest that there is


def test_many_shapes_layouts_and_dtypes_agree_with_a_plain_copy():
    generator = torch.Generator().manual_seed(0)
    items = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = (torch.randn(6, 200, generator=generator) * 10).to(dtype)
        items += [Item(values=view, scale=torch.tensor(3.0), fmt=E4M3) for view in (x, x.t(), x[:, ::3], x[0, 0])]
    for item, found in zip(items, what_if_many(items), strict=True):
        plain = what_if(Item(values=item.values.float().contiguous(), scale=item.scale, fmt=E4M3))
        assert torch.equal(found.underflowed, plain.underflowed)
        assert torch.equal(found.saturated, plain.saturated)
    assert what_if_many([]) == []
    assert what_if(Item(values=torch.zeros(0, 8), scale=torch.tensor(1.0), fmt=E4M3)).underflowed.tolist() == [0] * 5


def test_a_scale_a_row_has_its_margin_a_row():
    x = torch.randn(4, 130, generator=torch.Generator().manual_seed(3)) * torch.tensor([[1.0], [10], [100], [1000]])
    scale = 2 * E4M3.max / x.abs().amax(1, keepdim=True)  # each row clips
    found = what_if(Item(values=x, scale=scale, fmt=E4M3))
    rows = [what_if(Item(values=row, scale=one.reshape(()), fmt=E4M3)) for row, one in zip(x, scale, strict=True)]
    for i in range(2):
        assert found.saturated[i] == sum(int(row.saturated[i]) for row in rows)
    assert count(x, scale, E4M3).saturated > 0 == found.saturated[0]


def test_the_figures_of_a_normal_tensor_are_those_of_the_literature():
    """SNR in dB of 2^20 normal samples with one outlier of 1000 sigma, and of a scale four times too large."""
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    four_times = torch.tensor(4 * E4M3.max / 5.33)  # 5.33 sigma: the amax of 2^22 samples
    snr = dict(zip(CANDIDATES, what_if(Item(values=x, scale=four_times, fmt=E4M3)).snr, strict=True))
    assert snr["margin_1"].item() == pytest.approx(27.0, abs=0.6)  # twice too large is left
    for name in ("margin_2", "current", "block", "mxfp8"):
        assert snr[name].item() == pytest.approx(31.5, abs=0.5)
    x[0, 0] = 1e5
    stale = Item(values=x, scale=E4M3.max / x.abs().max(), fmt=E4M3)
    found = what_if(stale)
    lost = dict(zip(CANDIDATES, found.underflowed.tolist(), strict=True))
    assert lost["margin_1"] > lost["current"] > 100 * lost["block"]  # margin makes an outlier's underflow worse
    assert set(TILE) == {"block", "mxfp8"}
    assert lost["block"] <= 128  # only the outlier's own tile
    assert lost["mxfp8"] <= 32
