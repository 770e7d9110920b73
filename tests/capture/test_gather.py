"""The kernel that writes a step's numbers: what it is handed, when its writes count as complete, when it is not taken.

The kernel's work is done here by the C library on the same addresses; `tests/gpu/test_gpu_ring.py` runs the real one.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8watch.capture import gather as gather_module
from fp8watch.capture import ring as ring_module
from fp8watch.capture.gather import Gather, Mark, gather_for, try_out
from fp8watch.capture.ring import Ring
from fp8watch.capture.triton_launch import Shortcut

CPU = torch.device("cpu")
PIECES, DEVICE, FUNCTION, STREAM, METADATA = 12, 3, 111, 7, (8, 1, 0)


class Kernel:
    """In place of the C function; does its work when the test says so."""

    def __init__(self, *, is_slow: bool = False) -> None:
        self.is_slow = is_slow
        self.waiting: list[tuple[Any, ...]] = []
        self.launches = 0

    def __call__(self, *arguments: Any) -> None:
        head, own = arguments[:13], arguments[13:]
        assert head == (1, 1, 1, STREAM, FUNCTION, False, False, None, None, METADATA, None, None, None)
        assert own[-1] is None
        assert len(own) == 3 + 2 * PIECES + 1
        self.launches += 1
        self.waiting.append(own)
        if not self.is_slow:
            self.run()

    def run(self) -> None:
        while self.waiting:
            out, flag, sequence, *rest = self.waiting.pop(0)
            for address, units in zip(rest[:PIECES], rest[PIECES : 2 * PIECES], strict=True):
                ctypes.memmove(out, address, 2 * units)
                out += 2 * units
            ctypes.c_int32.from_address(flag).value = sequence


def short(kernel: Kernel, current: Any = None) -> Shortcut:
    return Shortcut(kernel, 1, FUNCTION, False, False, METADATA, DEVICE, current, lambda device: STREAM)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Rings of this test use it on the CPU."""
    made = Kernel()
    monkeypatch.setattr(ring_module, "gather_for", lambda slots, device: Gather(short(made), PIECES, slots, device))
    original = ring_module._Lane.__init__

    def build(self: Any, device: torch.device, slots: int, slot_bytes: int, *, may_map: bool) -> None:
        original(self, device, slots, slot_bytes, may_map=may_map)
        self._gather = ring_module.gather_for(self.host, device)

    monkeypatch.setattr(ring_module._Lane, "__init__", build)
    return made


def step(loss: float = 1.0) -> dict[str, Any]:
    return {
        "amax": [torch.rand(7), torch.rand(4)], "scale": [torch.rand(7), torch.rand(4)],
        "loss": torch.tensor(loss, requires_grad=True) * 1.0, "norm": torch.tensor(2.5, dtype=torch.bfloat16),
        "counts": torch.arange(3) + 2**40,
    }  # fmt: skip


def test_a_step_is_written_by_one_launch_and_arrives_to_the_bit(kernel: Kernel) -> None:
    ring: Ring[int] = Ring(CPU)
    for number in range(20):
        given_ = step(float(number))
        assert ring.push(given_, number)
        ((note, values),) = ring.poll()
        assert note == number
        assert values["amax"].tobytes() == torch.cat(given_["amax"]).numpy().tobytes()
        assert values["scale"].tobytes() == torch.cat(given_["scale"]).numpy().tobytes()
        assert (values.number("loss"), values.number("norm")) == (float(number), 2.5)
        assert values["counts"].tolist() == [2**40, 2**40 + 1, 2**40 + 2]
    assert kernel.launches == 20


@given(
    st.lists(st.tuples(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]), st.integers(0, 30)), max_size=15)
)
def test_it_is_the_same_as_a_concatenation(shapes: list[tuple[torch.dtype, int]]) -> None:
    kernel = Kernel()
    rings: list[Ring[int]] = [Ring(CPU), Ring(CPU)]
    lane = rings[0]._lanes[CPU]
    lane._gather = Gather(short(kernel), PIECES, lane.host, CPU)
    tensors = {f"t{i}": torch.arange(count).to(dtype) * (i + 1) for i, (dtype, count) in enumerate(shapes)}
    tensors["scalar"] = torch.tensor(0.5)
    found = []
    for ring in rings:
        assert ring.push(tensors, 0)
        ((_, values),) = ring.poll()
        found.append({name: values[name].tolist() for name in values})
    assert found[0] == found[1]
    assert kernel.launches == (len(tensors) <= PIECES)


def test_a_step_has_arrived_when_the_kernel_says_so_and_not_before(kernel: Kernel) -> None:
    kernel.is_slow = True
    ring: Ring[int] = Ring(CPU, slots=3)
    for number in range(3):
        assert ring.push(step(), number)
        assert ring.poll() == []
    assert not ring.push(step(), 3), "the ring is full"
    assert ring.dropped == 1
    kernel.run()
    assert [note for note, _ in ring.poll()] == [0, 1, 2]
    assert ring.push(step(), 4), "slots whose last write is complete are used again"
    assert ring.poll() == [], "a slot's former mark does not count"
    kernel.run()
    assert [note for note, _ in ring.poll()] == [4]


def test_waiting_for_a_kernel_that_never_ran_loses_its_step_alone(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = []

    class Stream:
        def __init__(self, address: int, device: torch.device) -> None:
            assert (address, device) == (STREAM, CPU)

        def synchronize(self) -> None:
            waited.append(len(kernel.waiting))
            kernel.run()

    monkeypatch.setattr(torch.cuda, "ExternalStream", Stream)
    kernel.is_slow = True
    ring: Ring[int] = Ring(CPU)
    ring.push(step(), 0)
    assert len(ring.poll(wait=True)) == 1
    assert waited == [1], "for the stream that it was launched on"
    for number in (1, 2, 3):
        ring.push(step(), number)
    del kernel.waiting[1]
    assert [note for note, _ in ring.poll(wait=True)] == [1, 3]
    assert ring.dropped == 1
    assert ring.push(step(), 4), "its slot is free again"


def test_address_0_is_the_default_stream_and_not_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.13 `torch.cuda.ExternalStream(0)` is a stream from the pool, which is idle."""
    flags = memoryview(np.zeros(1, np.int32))  # type: ignore[arg-type]
    waited = []

    class Default:
        def __init__(self, device: torch.device) -> None:
            assert device == CPU

        def synchronize(self) -> None:
            waited.append("default")
            flags[0] = 5

    monkeypatch.setattr(torch.cuda, "default_stream", Default)
    mark = Mark(flags, 0, CPU)
    mark.sequence, mark.stream = 5, 0
    mark.synchronize()
    assert waited == ["default"]
    assert mark.query()


def test_a_launch_that_raises_is_the_last_and_torch_goes_on(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    ring: Ring[int] = Ring(CPU)

    def fail(self: Any, *arguments: Any) -> None:
        self.launches += 1
        raise RuntimeError("CUDA_ERROR_INVALID_VALUE")

    monkeypatch.setattr(Kernel, "__call__", fail)
    for number in range(3):
        assert ring.push(step(float(number)), number)
        ((_, values),) = ring.poll()
        assert values.number("loss") == number
    assert kernel.launches == 1


@pytest.mark.parametrize("change", ["bytes of one", "not side by side", "subclass", "too many", "no memory"])
def test_what_it_cannot_write_is_concatenated(kernel: Kernel, change: str) -> None:
    given_ = step()
    if change == "bytes of one":
        given_["seen"] = torch.tensor([True, False, True])
    elif change == "not side by side":
        given_["column"] = torch.arange(6.0).view(3, 2)[:, 1]
    elif change == "subclass":
        given_["parameter"] = torch.nn.Parameter(torch.ones(2))
    elif change == "no memory":
        given_["zero"] = torch._efficientzerotensor(2)
    else:
        given_ |= {f"record{i}": torch.tensor(float(i)) for i in range(PIECES)}
    ring: Ring[int] = Ring(CPU)
    assert ring.push(given_, 0)
    ((_, values),) = ring.poll()
    assert kernel.launches == 0
    for name, wanted in given_.items():
        whole = torch.cat(wanted) if isinstance(wanted, list) else wanted.detach().clone()
        assert np.array_equal(values[name], whole.float().numpy() if whole.dtype is torch.bfloat16 else whole.numpy())


def test_another_current_device_is_left_alone() -> None:
    kernel = Kernel()
    slots = [torch.zeros(64, dtype=torch.uint8)]
    found = Gather(short(kernel, lambda: DEVICE + 1), PIECES, slots, CPU)
    assert found.write([torch.ones(2)], [8], 0) is None
    assert kernel.launches == 0


def test_without_triton_or_on_another_processor_torch_concatenates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_module, "_tried", {})
    device = torch.device("cuda", 0)
    assert gather_for([], device) is None, "not tried out"
    monkeypatch.setattr(gather_module.platform, "machine", lambda: "aarch64")
    try_out(device)
    assert gather_for([], device) is None
    monkeypatch.setattr(gather_module, "_tried", {})
    monkeypatch.setattr(gather_module.platform, "machine", lambda: "x86_64")
    monkeypatch.setitem(__import__("sys").modules, "triton", None)
    try_out(device)
    assert gather_for([], device) is None
