"""Scales read from objects with the attributes of Transformer Engine's quantized tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from standin_te.tensors import (
    DType,
    Float8BlockQuantizer,
    Float8BlockwiseQTensorStorage,
    Float8Quantizer,
    Float8TensorStorage,
    MXFP8TensorStorage,
    NVFP4TensorStorage,
    quantize,
)

from fp8watch.capture.te.tensors import is_delayed, read_scales, scale_arrays, scale_range

AMAXES = st.floats(2.0**-60, 2.0**60, width=32)


@given(AMAXES, st.sampled_from(["kFloat8E4M3", "kFloat8E5M2"]))
def test_current_scaling_gives_amax_back(amax, fmt):
    x = torch.tensor([0.25, -1.0, 0.5]) * amax
    scales = read_scales(quantize(x, fmt))
    if float(scales.worst) == 0:  # a scale of exactly 1 says nothing
        assert quantize(x, fmt)._scale_inv == 1
        return
    assert scales.recipe == "current"
    assert scales.fp8_format == fmt[-4:].lower()
    assert float(scales.amax) == pytest.approx(amax, rel=1e-6)
    assert float(scales.scale) == pytest.approx(scales.fp8_max / amax, rel=1e-6)


@pytest.mark.parametrize("x", [[0.0, 0.0], [1.0, float("inf")]])
def test_scale_of_one_is_not_taken_for_an_amax(x):
    scales = read_scales(quantize(torch.tensor(x)))
    assert float(scales.amax) == 0
    assert float(read_scales(quantize(torch.tensor(x)), raw=True).worst) == 1


@given(st.lists(AMAXES, min_size=4, max_size=4))
def test_block_scaling_gives_the_worst_block(amaxes):
    x = torch.tensor(amaxes).view(2, 2, 1) * torch.tensor([1.0, -0.5, 0.125, 0.0])
    tensor = quantize(x.reshape(2, 8), block=4)
    scales = read_scales(tensor)
    inverse = tensor._rowwise_scale_inv[:, :2].t().flatten().tolist()
    known = [a for a, s in zip(amaxes, inverse, strict=True) if s != 1]
    assert scales.recipe == "block"
    assert float(scales.amax) == pytest.approx(max(known, default=0), rel=1e-6)
    smallest, largest = scale_range(tensor)
    if known:
        assert float(smallest) == float(scales.scale)
        assert float(largest) == pytest.approx(448 / min(known), rel=1e-5)


def test_empty_block_does_not_hide_the_others():
    x = torch.zeros(1, 8)
    x[0, :4] = 1e-3
    scales = read_scales(quantize(x, block=4))  # the block of zeros has the scale 1, the other 448,000
    assert float(scales.amax) == pytest.approx(1e-3, rel=1e-6)
    assert float(read_scales(quantize(torch.zeros(1, 8), block=4)).amax) == 0


@pytest.mark.parametrize("side", ["rowwise", "columnwise"])
@pytest.mark.parametrize("is_square", [True, False])
def test_padding_of_block_scales_is_not_read(side, is_square):
    """Shapes as recorded from the library: a weight [512, 256] and an activation [66, 256]."""
    rows, columns = (512, 256) if is_square else (66, 256)
    if side == "columnwise":
        rows, columns = columns, rows
    shape = (rows // 128, columns // 128) if is_square else (-(-columns // 128), rows)
    scales = torch.full((shape[0], -(-shape[1] // 4) * 4), 1e9)
    scales[:, : shape[1]] = 0.5
    data = torch.zeros(rows, columns, dtype=torch.uint8)
    held = {f"_{side}_data": data, f"_{side}_scale_inv": scales}
    empty = {"_rowwise_data": None, "_rowwise_scale_inv": None}
    tensor = Float8BlockwiseQTensorStorage(
        **(empty | held), _is_2D_scaled=is_square, _quantizer=Float8BlockQuantizer()
    )  # fmt: skip
    assert float(read_scales(tensor).worst) == 0.5
    assert [float(scale) for scale in scale_range(tensor)] == [2.0, 2.0]


def test_number_of_a_dtype_is_not_taken_for_its_name():
    assert read_scales(quantize(torch.ones(3), "kFloat8E5M2")).fp8_format == "e5m2"
    assert str(DType.kFloat8E5M2.value) == "8"


def test_columnwise_scales_are_used_where_there_are_no_others():
    tensor = Float8BlockwiseQTensorStorage(None, None, torch.zeros(4, 4), torch.tensor([[0.5, 2.0]]))
    assert float(read_scales(tensor).scale) == 0.5


@given(st.lists(st.integers(1, 254), min_size=1, max_size=9), st.integers(0, 5))
def test_mxfp8_scales_are_powers_of_two(exponents, padding):
    raw = torch.tensor([*exponents, *[0] * padding], dtype=torch.uint8)
    tensor = MXFP8TensorStorage(torch.zeros(1), raw.reshape(1, -1), _fp8_dtype=DType.kFloat8E5M2)
    scales = read_scales(tensor)
    worst = torch.exp2(torch.tensor(float(max(exponents) - 127)))
    assert (scales.recipe, scales.fp8_format) == ("mxfp8", "e5m2")
    assert float(scales.worst) == float(worst)
    smallest, largest = scale_range(tensor)
    assert float(smallest) == float(scales.scale) == 2.0 ** (127 - max(exponents))
    assert float(largest) == pytest.approx(2.0 ** (127 - min(exponents)), rel=1e-6)


def test_mxfp8_nan_and_zeros():
    def read(*values: int) -> float:
        return float(read_scales(MXFP8TensorStorage(None, torch.tensor(values, dtype=torch.uint8))).amax)

    assert read(0, 0) == 0
    assert torch.tensor(read(120, 255)).isnan()
    assert read(127) == 448  # a power of two like any other


def test_nvfp4_has_an_amax_and_no_single_scale():
    rows = NVFP4TensorStorage(torch.zeros(1), torch.zeros(4, dtype=torch.uint8), torch.tensor([0.5, 3.0, 1.0]))
    scales = read_scales(rows)
    assert (scales.recipe, float(scales.amax), scales.scale) == ("nvfp4", 3.0, None)
    columns = NVFP4TensorStorage(None, None, None, torch.zeros(1), torch.zeros(1), torch.tensor([7.0]))
    assert float(read_scales(columns).amax) == 7.0
    assert scale_range(rows) is None


def test_plain_and_unknown_objects_are_none():
    assert read_scales(torch.zeros(3)) is None
    assert read_scales(object()) is None
    assert read_scales(None) is None
    assert scale_range(torch.zeros(3)) is None
    assert list(scale_arrays(torch.zeros(3))) == []
    assert read_scales(Float8BlockwiseQTensorStorage(None, torch.zeros(2, dtype=torch.int32))) is None


def test_delayed_scaling_is_told_from_current():
    tensor = quantize(torch.ones(2))
    assert not is_delayed(tensor)
    assert is_delayed(Float8TensorStorage(tensor._data, tensor._scale_inv, _quantizer=Float8Quantizer()))
