"""The fused counting kernel gives exactly torch's counts: on a GPU, and in Triton's interpreter if Triton is there."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import interpreted
from kernel_cases import cast_differences, differences, groups


def test_interpreted_kernel_counts_what_torch_counts():
    interpreted.run("kernel_cases.py")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_kernel_counts_what_torch_counts():
    from fp8watch.capture.statistics import count_many, kernels

    for items in groups("cuda", 1 << 22):
        assert all(kernels.fits(item) for item in items)
        assert differences(kernels.launch(items), items) == []
        assert differences(count_many(items), items) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_kernel_of_one_cast_adds_what_torch_counts():
    from fp8watch.capture.te import cast_kernel

    cast_kernel._launches.clear()
    assert list(cast_differences("cuda", 1 << 22)) == []
    assert cast_kernel._launches  # most of them went the short way


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_transposed_weight_is_counted_where_it_lies_and_nothing_waits():
    from fp8watch.capture.statistics import Item, count_many
    from fp8watch.formats import E4M3

    weight = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    scale = (448 / weight.float().abs().amax(1)).reshape(1, -1)
    items = [Item(values=weight.t(), scale=scale, fmt=E4M3)] * 3
    count_many(items)  # compiled
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = count_many(items)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert differences(found, items) == []
