"""What is read by long loads, and what one number at a time."""

from __future__ import annotations

import pytest
import torch

from fp8watch.capture.statistics import Item, fused_items
from fp8watch.capture.statistics.fused_items import A_COLUMN, A_ROW, ONE
from fp8watch.formats import E4M3


def item(shape: tuple[int, ...], mode: int = ONE, *, off: str = "", dtype: torch.dtype = torch.bfloat16) -> Item:
    """A tensor with its scale and codes, one of which (`off`) lies one element behind an aligned address."""
    scale = {ONE: (), A_ROW: (*shape[:-1], 1), A_COLUMN: (*(1 for _ in shape[:-1]), shape[-1])}[mode]
    return Item(
        values=placed(shape, dtype, off == "values"),
        scale=placed(scale, torch.float32, off == "scale"),
        fmt=E4M3,
        codes=placed(shape, torch.uint8, off == "codes"),
    )


def placed(shape: tuple[int, ...], dtype: torch.dtype, is_off: bool) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    flat = torch.ones(numel + 32, dtype=dtype)
    start = -(flat.data_ptr() // flat.element_size()) % 16 + is_off
    return flat[start : start + numel].view(shape)


@pytest.mark.parametrize("mode", [ONE, A_ROW, A_COLUMN])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_aligned_rows_of_a_multiple_of_16_are_read_by_long_loads(mode, dtype):
    given = item((3, 48), mode, dtype=dtype)
    assert fused_items.scale_mode(given.values, given.scale) == mode
    assert fused_items.is_regular(given, by_row=False)
    assert fused_items.is_regular(given, by_row=True)


@pytest.mark.parametrize("mode", [ONE, A_ROW, A_COLUMN])
@pytest.mark.parametrize("off", ["values", "codes"])
def test_an_address_that_is_not_aligned_is_never_read_by_long_loads(mode, off):
    assert not fused_items.is_regular(item((3, 48), mode, off=off), by_row=False)


def test_the_address_of_a_scale_matters_only_if_many_are_read_at_once():
    assert not fused_items.is_regular(item((3, 48), A_COLUMN, off="scale"), by_row=False)
    assert fused_items.is_regular(item((3, 48), A_ROW, off="scale"), by_row=False)
    assert fused_items.is_regular(item((3, 48), ONE, off="scale"), by_row=False)


def test_a_load_never_crosses_rows_that_differ_nor_the_end():
    assert not fused_items.is_regular(item((16, 25), A_ROW), by_row=False)
    assert not fused_items.is_regular(item((16, 25), A_COLUMN), by_row=False)
    assert fused_items.is_regular(item((16, 25), ONE), by_row=False)  # 400 elements, all with one scale
    assert not fused_items.is_regular(item((16, 25), ONE), by_row=True)
    assert not fused_items.is_regular(item((3, 25), ONE), by_row=False)


def test_more_rows_than_32_bits_number_are_left_to_torch():
    for shape, is_large in (((1 << 30, 1), True), ((2, 1 << 30), True), ((1 << 16, 1 << 16), False)):
        assert fused_items.is_large(torch.empty(shape, device="meta")) is is_large


def test_a_transposed_matrix_is_counted_as_it_lies():
    weight = torch.ones(4, 8)
    turned = fused_items.by_rows(Item(values=weight.t(), scale=torch.ones(1, 4), fmt=E4M3))
    assert turned.values.is_contiguous()
    assert fused_items.scale_mode(turned.values, turned.scale) == A_ROW


def test_a_scale_a_column_without_a_dimension_for_rows_is_turned_too():
    """Of a square matrix it would else be taken for one per column of what lies in memory."""
    weight = torch.randn(16, 16)
    turned = fused_items.by_rows(Item(values=weight.t(), scale=torch.arange(16.0), fmt=E4M3))
    assert turned.values.is_contiguous()
    assert fused_items.scale_mode(turned.values, turned.scale) == A_ROW
    assert torch.equal(turned.values * turned.scale, (weight.t() * torch.arange(16.0)).t())
    one = fused_items.by_rows(Item(values=weight.t(), scale=torch.ones(1), fmt=E4M3))
    assert fused_items.scale_mode(one.values, one.scale) == ONE
