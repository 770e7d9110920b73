"""Kernels write a step's numbers to pinned memory: what arrives is the same as through a copy, and nothing waits.

python -m pytest tests/gpu/test_gpu_ring.py -m gpu
"""

from __future__ import annotations

import pytest
import torch

from fp8watch.capture import ring as ring_module
from fp8watch.capture.mapped import can_map, mapped
from fp8watch.capture.ring import Ring
from fp8watch.capture.triton_launch import KNOWN_VERSIONS

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
        "counts": torch.randint(1 << 40, (676,), device=DEVICE),
        # A byte an element: then torch concatenates.
        **({"seen": torch.rand(676, device=DEVICE) > 0.5} if number % 5 == 4 else {}),
        "loss": torch.rand((), device=DEVICE), "norm": torch.rand((), device=DEVICE, dtype=torch.bfloat16),
    }  # fmt: skip


@pytest.mark.parametrize("way", ["gathered", "mapped", "copied"])
def test_every_step_arrives_to_the_bit_without_waiting(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_mapped = way != "copied"
    if is_mapped and not can_map(DEVICE):
        pytest.skip("kernels of this device cannot write to pinned memory")
    monkeypatch.setattr(ring_module, "can_map", lambda device: is_mapped)
    if way != "gathered":
        monkeypatch.setattr(ring_module, "gather_for", lambda slots, device: None)
    ring: Ring[int] = Ring(DEVICE)
    lane = ring._lanes[DEVICE]
    assert (lane._staging is None) is is_mapped
    if way == "gathered" and lane._gather is None:
        triton = pytest.importorskip("triton")
        assert not triton.__version__.startswith(KNOWN_VERSIONS)
        pytest.skip(f"Triton {triton.__version__} is not known")
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
    if lane._gather is not None:
        assert lane._gather._sequence == 16, "every step but those with bytes"
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


@pytest.mark.parametrize("is_default", [True, False], ids=["default stream", "side stream"])
def test_who_waits_gets_late_numbers(is_default: bool) -> None:
    ring: Ring[int] = Ring(DEVICE)
    value = torch.zeros((), device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.default_stream() if is_default else torch.cuda.Stream()):
        torch.cuda._sleep(1_000_000_000)  # about half a second
        value.fill_(5.0)
        assert ring.push({"value": value}, 1)
        assert ring.poll() == []
        assert [(note, float(values["value"])) for note, values in ring.poll(wait=True)] == [(1, 5.0)]
    assert ring.dropped == 0


def test_a_graph_capture_and_side_streams_do_not_disturb_it() -> None:
    ring: Ring[int] = Ring(DEVICE)
    side = torch.cuda.Stream()
    value = torch.zeros((), device=DEVICE)
    with torch.cuda.stream(side):
        for number in range(3):
            torch.cuda._sleep(20_000_000)  # about 10 ms, so that the numbers are late
            value.fill_(number)
            assert ring.push({"value": value, "bf16": value.bfloat16()}, number)
            assert ring.poll() == [], "not before the kernel of its stream has run"
        side.synchronize()
        assert [(note, float(values["value"])) for note, values in ring.poll()] == [(0, 0.0), (1, 1.0), (2, 2.0)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert not ring.push({"value": value}, 3)
        assert ring.poll() == []
    assert ring.dropped == 1
    assert ring.push({"value": value}, 4)
    assert [note for note, _ in ring.poll(wait=True)] == [4]
