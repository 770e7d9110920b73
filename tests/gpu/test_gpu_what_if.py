"""The fused what-if kernel gives exactly torch's counts: on a GPU, and in Triton's interpreter if Triton is there."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import interpreted
from kernel_cases import all_values
from what_if_cases import amaxes, differences, groups


def test_interpreted_kernel_says_what_torch_says():
    interpreted.run("what_if_cases.py")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_kernel_says_what_torch_says_on_a_gpu():
    from fp8watch.capture.statistics import what_if_kernels
    from fp8watch.capture.statistics.what_if import what_if_many

    for items in groups("cuda", 1 << 22):
        assert all(what_if_kernels.fits(item) for item in items)
        assert differences(what_if_kernels.launch(items, amaxes(items)), items) == []
        assert differences(what_if_many(items), items) == []
    items = list(all_values("cuda"))
    assert differences(what_if_kernels.launch(items, amaxes(items)), items) == []


# case: HOK-15
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_nothing_waits_and_one_pass_costs_little_more_than_one_count():
    from fp8watch.capture.statistics import Item, count_many
    from fp8watch.capture.statistics.what_if import what_if_by_torch, what_if_many
    from fp8watch.formats import E4M3

    values = torch.randn(4096, 8192, device="cuda", dtype=torch.bfloat16)
    scale, amax = torch.tensor(50.0, device="cuda"), values.abs().amax().float()
    items = [Item(values=values, scale=scale, fmt=E4M3)] * 4
    count_many(items)
    what_if_many(items, [amax] * 4)  # compiled
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = what_if_many(items, [amax] * 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert differences(found, items) == []

    def milliseconds(work):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(10):
            work()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 10

    once = milliseconds(lambda: count_many(items))
    all_candidates = milliseconds(lambda: what_if_many(items, [amax] * 4))
    rate = 4 * values.numel() * 2 / all_candidates / 1e6
    print(f"count {once:.3f} ms, what if {all_candidates:.3f} ms ({rate:.0f} GB/s)")
    by_torch = milliseconds(lambda: [what_if_by_torch(item, amax) for item in items])
    print(f"by torch {by_torch:.3f} ms")
    assert all_candidates < 10 * once
    assert all_candidates < by_torch / 5
