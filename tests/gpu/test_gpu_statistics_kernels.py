"""The fused counting kernel gives exactly torch's counts: on a GPU, and in Triton's interpreter if Triton is there."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import interpreted
from kernel_cases import all_values, cast_differences, differences, groups


def test_interpreted_kernel_counts_what_torch_counts():
    interpreted.run("kernel_cases.py")


@pytest.mark.parametrize(
    ("capability", "is_exact"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True)]
)
def test_the_conversion_of_a_gpu_is_used_only_where_it_rounds_once(monkeypatch, capability, is_exact):
    from fp8watch.capture.statistics import kernels

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert kernels.has_fp8_conversion(torch.device("cuda")) is is_exact
    assert not kernels.has_fp8_conversion(torch.device("cpu"))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not kernels.has_fp8_conversion(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_kernel_counts_what_torch_counts():
    from fp8watch.capture.statistics import count_many, kernels

    for items in groups("cuda", 1 << 22):
        assert all(kernels.fits(item) for item in items)
        assert differences(kernels.launch(items), items) == []
        assert differences(count_many(items), items) == []
    items = list(all_values("cuda"))
    assert differences(kernels.launch(items), items) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_kernel_counts_the_same_without_the_conversion_of_the_gpu(monkeypatch):
    from fp8watch.capture.statistics import kernels

    monkeypatch.setattr(kernels, "has_fp8_conversion", lambda device: False)
    items = [*all_values("cuda"), *next(groups("cuda", 1 << 16))]
    assert differences(kernels.launch(items), items) == []


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
    from fp8watch.formats import E4M3, E5M2

    weight = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    scale = (448 / weight.float().abs().amax(1)).reshape(1, -1)
    items = [Item(values=weight.t(), scale=scale, fmt=E4M3)] * 3
    items.append(Item(values=weight, scale=scale[0, 0].clone(), fmt=E5M2))  # counted by another launch
    count_many(items)  # compiled
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = count_many(items)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert differences(found, items) == []
