"""Tensors with one scale per row or block: the share of clipped blocks and the spread of the scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fp8watch.capture.statistics.block_scales import block_statistics, spread_log2
from fp8watch.formats import E4M3, FORMATS


def scales(blocks: torch.Tensor) -> torch.Tensor:
    return E4M3.max / blocks.abs().amax(1, keepdim=True)


def share(blocks: torch.Tensor, scale: torch.Tensor) -> float:
    found = block_statistics(blocks, scale, E4M3)
    assert found is not None
    return float(found.clipped_blocks) / float(found.blocks)


def test_two_tensors_of_the_same_range_of_scales_differ_in_their_clipped_blocks() -> None:  # case: NUM-17
    torch.manual_seed(0)
    blocks = torch.randn(1024, 32)
    scale = scales(blocks)
    stale = blocks.clone()
    stale[:307] *= 8  # 30 % of the blocks have grown since their scales were made
    healthy, clipped = block_statistics(blocks, scale, E4M3), block_statistics(stale, scale, E4M3)
    assert healthy is not None
    assert clipped is not None
    assert (float(healthy.smallest), float(healthy.largest)) == (float(clipped.smallest), float(clipped.largest))
    assert (int(healthy.blocks), int(healthy.clipped_blocks)) == (1024, 0)
    assert (int(clipped.blocks), int(clipped.clipped_blocks)) == (1024, 307)


def test_the_spread_is_that_of_finite_scales_in_bits() -> None:
    scale = torch.tensor([[1.0], [8.0], [torch.inf], [0.0]])
    found = block_statistics(torch.ones(4, 4), scale, E4M3)
    assert found is not None
    assert float(spread_log2(found.largest, found.smallest)) == 3.0
    none = block_statistics(torch.ones(2, 4), torch.full((2, 1), torch.inf), E4M3)
    assert none is not None
    assert float(spread_log2(none.largest, none.smallest)) == 0.0


@pytest.mark.parametrize(
    ("shape", "of_scale", "blocks"),
    [((6, 4), (6, 1), 6), ((6, 4), (1, 4), 4), ((2, 3, 4), (2, 3, 1), 6), ((3, 4), (3, 4), 12)],
)
def test_a_scale_a_row_a_column_or_an_element(shape: tuple[int, ...], of_scale: tuple[int, ...], blocks: int) -> None:
    found = block_statistics(torch.ones(shape), torch.full(of_scale, 1000.0), E4M3)
    assert found is not None
    assert (int(found.blocks), int(found.clipped_blocks)) == (blocks, blocks)


@pytest.mark.parametrize("scale", [torch.tensor(2.0), torch.ones(1, 1), torch.ones(4)])
def test_one_scale_or_one_of_another_form_has_no_blocks(scale: torch.Tensor) -> None:
    assert block_statistics(torch.ones(4, 4), scale, E4M3) is None
    assert block_statistics(torch.ones(0, 4), torch.ones(0, 1), E4M3) is None


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 9), st.integers(1, 17), st.integers(0, 2**31), st.sampled_from(sorted(FORMATS)),
    st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_it_counts_what_a_loop_over_the_rows_counts(
    rows: int, width: int, seed: int, name: str, dtype: torch.dtype
) -> None:
    fmt, generator = FORMATS[name], torch.Generator().manual_seed(seed)
    values = torch.randn(rows, width, generator=generator).to(dtype)
    scale = fmt.max * torch.exp2(torch.randn(rows, 1, generator=generator))
    found = block_statistics(values, scale, fmt)
    assert found is not None
    limit = fmt.max * (1 + 2.0**-10)
    wanted = sum(bool((values[i].float().abs() * scale[i] > limit).any()) for i in range(rows))
    assert int(found.clipped_blocks) == wanted
    assert float(found.largest) == float(scale.max())
    assert float(found.smallest) == float(scale.min())


def test_a_row_with_nan_is_not_called_clipped() -> None:
    values = torch.tensor([[torch.nan, 1.0], [1.0, 1.0], [torch.inf, 1.0]])
    found = block_statistics(values, torch.full((3, 1), 2.0), E4M3)
    assert found is not None
    assert int(found.clipped_blocks) == 1


def test_rowwise_layers_show_them_and_tensorwise_layers_beside_them_do_not() -> None:  # case: NUM-17
    pytest.importorskip("torchao")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    from fp8watch.capture.torchao.float8 import TorchaoSource

    torch.manual_seed(0)
    by_row, by_tensor = nn.Sequential(nn.Linear(32, 64, bias=False)), nn.Sequential(nn.Linear(64, 16, bias=False))
    with torch.no_grad():
        by_row[0].weight[:16] *= 64
    convert_to_float8_training(by_row, config=_emulated(Float8LinearConfig.from_recipe_name("rowwise")))
    convert_to_float8_training(by_tensor, config=Float8LinearConfig(emulate=True))
    model = nn.Sequential(by_row, by_tensor)
    source = TorchaoSource(model)
    try:
        found = {}
        for _ in range(2):
            source.begin(with_statistics=True)
            model(torch.randn(16, 32)).square().sum().backward()
            reading = source.read()
            assert reading is not None
            for i, column in enumerate(source.columns()):
                found[column.name] = {
                    name: float(values[i])
                    for name, values in reading.values.items()
                    if name in ("blocks", "clipped_blocks", "scale_spread") and reading.validity(name)[i]
                }
        assert found["0.0:weight"]["blocks"] == 64, "one a row, and not those of two steps"
        assert found["0.0:weight"]["clipped_blocks"] == 0
        assert 5 < found["0.0:weight"]["scale_spread"] < 9
        assert found["0.0:input"]["blocks"] == 16
        assert found["1.0:weight"] == found["1.0:input"] == {}
    finally:
        source.detach()


def test_rows_cast_with_too_large_a_scale_arrive_as_clipped(monkeypatch: pytest.MonkeyPatch) -> None:  # case: NUM-17
    pytest.importorskip("torchao")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training, float8_scaling_utils

    from fp8watch.capture.torchao.float8 import TorchaoSource

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64, bias=False))
    convert_to_float8_training(model, config=_emulated(Float8LinearConfig.from_recipe_name("rowwise")))
    right = float8_scaling_utils.tensor_to_scale

    def wrong(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        scale = right(tensor, *args, **options)
        if scale.shape == (16, 1):  # the rows of the input
            scale[:5] *= 2
        return scale

    monkeypatch.setattr(float8_scaling_utils, "tensor_to_scale", wrong)
    source = TorchaoSource(model)
    try:
        source.begin(with_statistics=True)
        model(torch.randn(16, 32)).square().sum().backward()
        reading = source.read()
        assert reading is not None
        place = [column.name for column in source.columns()].index("0:input")
        assert [int(reading.values[name][place]) for name in ("blocks", "clipped_blocks")] == [16, 5]
    finally:
        source.detach()


def _emulated(config: object) -> object:
    from dataclasses import replace

    return replace(config, emulate=True)  # type: ignore[type-var]
