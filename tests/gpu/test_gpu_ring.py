"""Kernels write a step's numbers to pinned memory: what arrives is the same as through a copy, and nothing waits.

python -m pytest tests/gpu/test_gpu_ring.py -m gpu
"""

from __future__ import annotations

import pytest
import torch

from fp8watch.capture import ring as ring_module
from fp8watch.capture.mapped import can_map, mapped
from fp8watch.capture.ring import Ring

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

DEVICE = torch.device("cuda", torch.cuda.current_device())


def step(number: int) -> dict[str, torch.Tensor | list[torch.Tensor]]:
    """As of a run in BF16, with counts; of sizes that are no multiple of anything."""
    torch.manual_seed(number)
    amax = [torch.rand(n, device=DEVICE) for n in (417, 259)]
    return {
        "amax": amax, "scale": [448.0 / part for part in amax],
        "counts": torch.randint(1 << 40, (676,), device=DEVICE), "seen": torch.rand(676, device=DEVICE) > 0.5,
        "loss": torch.rand((), device=DEVICE), "norm": torch.rand((), device=DEVICE, dtype=torch.bfloat16),
    }  # fmt: skip


@pytest.mark.parametrize("is_mapped", [True, False])
def test_every_step_arrives_to_the_bit_without_waiting(is_mapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_mapped and not can_map(DEVICE):
        pytest.skip("kernels of this device cannot write to pinned memory")
    monkeypatch.setattr(ring_module, "can_map", lambda device: is_mapped)
    ring: Ring[int] = Ring(DEVICE)
    assert (ring._lanes[DEVICE]._staging is None) is is_mapped
    steps = [step(number) for number in range(20)]
    wanted = [{k: torch.cat(v) if isinstance(v, list) else v.clone() for k, v in one.items()} for one in steps]
    found = {}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    for number, one in enumerate(steps):
        assert ring.push(one, number)
        for given in one.values():  # as a framework writes over its own
            for tensor in given if isinstance(given, list) else [given]:
                tensor.zero_()
        found.update(ring.poll())
        if len(ring) > 6:
            torch.cuda.current_stream().synchronize()
            found.update(ring.poll())
    torch.cuda.set_sync_debug_mode("default")
    found.update(ring.poll(wait=True))
    assert sorted(found) == list(range(20))
    for number, values in found.items():
        for name, tensor in wanted[number].items():
            exact = tensor.float() if tensor.is_floating_point() else tensor
            assert values[name].tolist() == exact.tolist(), name


def test_memory_is_the_same_on_both_sides() -> None:
    if not can_map(DEVICE):
        pytest.skip("kernels of this device cannot write to pinned memory")
    host = torch.zeros(4096, dtype=torch.uint8).pin_memory()
    held = torch.cuda.memory_allocated()
    seen = mapped(host, DEVICE)
    seen.copy_(torch.arange(4096, device=DEVICE).to(torch.uint8))
    torch.cuda.synchronize()
    assert host.tolist() == [i % 256 for i in range(4096)]
    assert torch.cuda.memory_allocated() == held, "it takes no memory of the device"
