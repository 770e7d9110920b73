from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8watch.capture import ring as ring_module
from fp8watch.capture.mapped import can_map
from fp8watch.capture.ring import Ring

DTYPES = [torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.uint8, torch.bool]


class Event:
    """An event of a device that is as slow as the test wants."""

    def __init__(self) -> None:
        self.is_done = False
        self.waited = False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.waited = self.is_done = True


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Copies are complete when the test says so."""
    events: list[Event] = []
    original = ring_module._Lane.copy

    def copy(self, plan, tensors, sizes, slot):
        original(self, plan, tensors, sizes, slot)
        events.append(Event())
        return events[-1]

    monkeypatch.setattr(ring_module._Lane, "copy", copy)
    return events


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 40)), max_size=8), st.integers(1, 4))
def test_what_goes_in_comes_out(shapes, slots):
    ring: Ring[int] = Ring(torch.device("cpu"), slots=slots, slot_bytes=64)
    for note in range(3):
        tensors = {
            f"t{i}": (torch.arange(n) % 2).to(dtype) if n else torch.zeros(0, dtype=dtype)
            for i, (dtype, n) in enumerate(shapes)
        }
        tensors["scalar"] = torch.tensor(0.5 + note)
        assert ring.push(tensors, note)
        ((found, values),) = list(ring.poll())
        assert found == note
        assert values.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert np.array_equal(values[name], tensor.numpy())
            assert values[name].dtype == tensor.numpy().dtype
        assert values["scalar"].shape == ()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.sampled_from([*DTYPES, torch.bfloat16]))
def test_pieces_arrive_as_one_tensor(sizes, dtype):
    """As the vectors of a framework lie: nothing is put together on the device but by the ring's own concatenation."""
    ring: Ring[int] = Ring(torch.device("cpu"), slot_bytes=64)
    pieces = [(torch.arange(n) % 2).to(dtype) + i % 2 for i, n in enumerate(sizes)]
    other = torch.full((3,), 7.0)
    ring.push({"before": other, "scalar": torch.tensor(0.5), "whole": pieces, "after": other}, 0)
    ((_, values),) = list(ring.poll())
    assert values["whole"].tolist() == torch.cat(pieces).tolist()
    assert values["before"].tolist() == values["after"].tolist() == [7.0] * 3
    assert values["scalar"] == 0.5


@given(st.lists(st.floats(width=32), min_size=1, max_size=20), st.booleans())
def test_bf16_is_widened_on_the_host_to_the_bit(numbers, is_alone):
    """Alone it is joined as it is, beside another dtype as bytes at whatever offset."""
    ring: Ring[int] = Ring(torch.device("cpu"), slot_bytes=64)
    given_ = torch.tensor(numbers).to(torch.bfloat16)
    others = {} if is_alone else {"flag": torch.tensor([True]), "float": torch.tensor([0.5])}
    ring.push({**others, "values": given_, "scalar": given_[0], "pieces": [given_, given_[:1]]}, 0)
    ((_, values),) = ring.poll()
    wanted = given_.to(torch.float32).numpy()
    assert values["values"].tobytes() == values.raw("values") == wanted.tobytes()
    assert np.array_equal(np.float32(values.number("scalar")), wanted[0], equal_nan=True)
    assert values.raw("pieces") == wanted.tobytes() + wanted[:1].tobytes()


def test_dtypes_that_the_host_cannot_read_become_float32():
    ring: Ring[int] = Ring(torch.device("cpu"))
    ring.push(
        {"e4m3": torch.tensor([1.5, -448.0]).to(torch.float8_e4m3fn), "i2": torch.tensor(3, dtype=torch.int16)}, 0
    )
    ((_, values),) = ring.poll()
    assert values["e4m3"].tolist() == [1.5, -448.0]
    assert values["i2"] == 3.0


def test_elements_that_are_not_side_by_side_arrive_in_order():
    ring: Ring[int] = Ring(torch.device("cpu"))
    ring.push({"column": torch.arange(6.0).view(3, 2)[:, 1], "flag": torch.tensor(True)}, 0)
    ((_, values),) = ring.poll()
    assert values["column"].tolist() == [1.0, 3.0, 5.0]


def test_a_loss_with_a_graph_is_taken_without_it():
    weight = torch.ones(2, requires_grad=True)
    for norm in (torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.0)):
        ring: Ring[int] = Ring(torch.device("cpu"))
        ring.push({"loss": (weight * 3.0).sum(), "norm": norm, "vector": weight * 2.0}, 0)
        ((_, values),) = ring.poll()
        assert values["loss"] == 6.0
        assert values["vector"].tolist() == [2.0, 2.0]


def test_parts_of_different_dtypes_shift_nothing():
    """A framework's float32 vector beside one that was made under another default dtype."""
    ring: Ring[int] = Ring(torch.device("cpu"))
    parts = [torch.zeros(3, dtype=torch.bfloat16), torch.full((2,), 1.5), torch.ones(2, dtype=torch.float64)]
    for order in (parts, parts[::-1]):
        ring.push({"mixed": order, "loss": torch.tensor(3.5)}, 0)
        ((_, values),) = ring.poll()
        assert values["mixed"].tolist() == [value for part in order for value in part.tolist()]
        assert values["loss"] == 3.5


def test_whole_numbers_keep_all_their_bits():
    ring: Ring[int] = Ring(torch.device("cpu"))
    ring.push({"tokens": torch.tensor(2**40 + 7), "half": torch.tensor(0.5, dtype=torch.float16)}, 0)
    ((_, values),) = ring.poll()
    assert values.number("tokens") == 2**40 + 7
    assert values.number("half") == 0.5


def test_without_a_device_nothing_can_be_mapped():
    if not torch.cuda.is_available():
        assert can_map(torch.device("cuda", 0)) is False


def test_what_two_devices_bring_is_one_step():
    arrived = []
    for offset in (0.0, 10.0):
        ring: Ring[int] = Ring(torch.device("cpu"))
        ring.push({f"a{offset}": torch.arange(3.0) + offset, f"s{offset}": torch.tensor(7) + int(offset)}, 0)
        ((_, values),) = list(ring.poll())
        arrived.append(values)
    both = arrived[0].beside(arrived[1])
    assert both["a0.0"].tolist() == [0.0, 1.0, 2.0]
    assert both["a10.0"].tolist() == [10.0, 11.0, 12.0]
    assert both.raw("a10.0") == torch.arange(10.0, 13.0).numpy().tobytes()
    assert (both.number("s0.0"), both.number("s10.0")) == (7.0, 17.0)
    assert both["s10.0"].shape == ()


def test_a_graph_is_not_followed():
    ring: Ring[int] = Ring(torch.device("cpu"))
    weight = torch.ones((), requires_grad=True)
    ring.push({"loss": weight * 2.0, "half": (weight * 3.0).bfloat16()}, 0)
    ((_, values),) = list(ring.poll())
    assert (values.number("loss"), values.number("half")) == (2.0, 3.0)


def test_dtypes_numpy_has_not_are_widened():
    ring: Ring[None] = Ring(torch.device("cpu"))
    ring.push({"a": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}, None)
    ((_, values),) = list(ring.poll())
    assert values["a"].tolist() == [1.5, -2.0]


def test_source_may_be_overwritten_after_push():
    ring: Ring[None] = Ring(torch.device("cpu"))
    tensor = torch.ones(3)
    ring.push({"a": tensor}, None)
    tensor.zero_()
    ((_, values),) = list(ring.poll())
    assert values["a"].tolist() == [1.0, 1.0, 1.0]


def test_poll_waits_for_nothing_and_keeps_the_order(slow):
    ring: Ring[int] = Ring(torch.device("cpu"), slots=4)
    for step in range(3):
        ring.push({"a": torch.full((2,), float(step))}, step)
    slow[1].is_done = True
    assert list(ring.poll()) == []  # the oldest is not there yet
    slow[0].is_done = True
    assert [note for note, _ in ring.poll()] == [0, 1]
    assert [note for note, _ in ring.poll(wait=True)] == [2]
    assert [event.waited for event in slow] == [False, False, True]


def test_full_ring_drops_and_counts_and_recovers(slow):
    ring: Ring[int] = Ring(torch.device("cpu"), slots=2)
    assert [ring.push({"a": torch.zeros(1)}, step) for step in range(5)] == [True, True, False, False, False]
    assert ring.dropped == 3
    slow[0].is_done = slow[1].is_done = True
    assert [note for note, _ in ring.poll()] == [0, 1]
    assert ring.push({"a": torch.zeros(1)}, 5)


def test_more_than_a_slot_holds_gets_a_larger_one(slow):
    ring: Ring[int] = Ring(torch.device("cpu"), slots=3, slot_bytes=32)
    ring.push({"a": torch.ones(4)}, 0)
    ring.push({"a": torch.arange(1000.0)}, 1)
    for event in slow:
        event.is_done = True
    small, large = ring.poll()
    assert small[1]["a"].tolist() == [1.0] * 4
    assert large[1]["a"].tolist() == list(range(1000))


def test_nothing_is_recorded_or_asked_during_a_graph_capture(monkeypatch):
    ring: Ring[int] = Ring(torch.device("cpu"))
    ring.push({"a": torch.zeros(1)}, 0)
    monkeypatch.setattr(ring_module, "is_capturing", lambda: True)
    assert not ring.push({"a": torch.zeros(1)}, 1)
    assert list(ring.poll()) == []
    monkeypatch.setattr(ring_module, "is_capturing", lambda: False)
    assert [note for note, _ in ring.poll()] == [0]
    assert ring.dropped == 1


def test_failed_push_gives_its_slot_back():
    ring: Ring[int] = Ring(torch.device("cpu"), slots=1)
    for _ in range(3):
        with pytest.raises((RuntimeError, NotImplementedError)):
            ring.push({"a": torch.zeros(1, device="meta")}, 0)
    assert ring.push({"a": torch.zeros(1)}, 1)
