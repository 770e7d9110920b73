"""Counters of casts as columns, added to readings of every form."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_te_statistics import COLUMNS, counts, two_layers
from torch.utils._python_dispatch import TorchDispatchMode

from fp8watch import columns
from fp8watch.capture.frames import LayoutBook, StepNote, build_frame, device_values
from fp8watch.capture.ring import Ring
from fp8watch.capture.source import Pieces, Places, Reading
from fp8watch.records import TensorColumn

NUM = len(COLUMNS)


@pytest.fixture
def parts():
    yield from two_layers(4.0)


def step(parts, *, is_looking: bool = False) -> None:
    model, extension, statistics = parts
    statistics.begin(is_sampled=True)
    if is_looking:
        statistics.look_closer(["b"])
    for name, rows in (("b", 3), ("a", 2)):
        extension.quantize(torch.randn(rows, 8) * 1e-3, model[name].quantizers["scaling_fwd"][0])
        extension.bgrad_quantize(torch.randn(rows, 8) * 1e3, model[name].quantizers["scaling_bwd"][0])


@pytest.mark.parametrize("is_looking", [False, True])
@pytest.mark.parametrize("indices", [None, [9, 8, 7, 5, 4, 3, 1, 0]])
def test_a_reading_in_parts_stays_in_parts_and_says_the_same(parts, indices, is_looking):
    statistics = parts[2]
    step(parts, is_looking=is_looking)
    amax = torch.arange(1.0, NUM + 1)
    whole = statistics.add_to(Reading(values={"amax": amax}, zero_is_unseen=True), lambda: COLUMNS)
    raw = amax
    if indices is not None:
        raw = torch.zeros(11)
        raw[indices] = amax
    pieces = Pieces({"amax": list(raw.split(4))}, None if indices is None else Places(indices))
    given = Reading(values=pieces, zero_is_unseen=True, updates_forward=3)
    found = statistics.add_to(given, lambda: COLUMNS)
    assert isinstance(found.values, Pieces)
    assert (found.zero_is_unseen, found.updates_forward) == (True, 3)
    assert list(found.values) == list(whole.values)
    assert {"quantized", "mse"} < set(found.values)
    for name, held in whole.values.items():
        seen = whole.validity(name)
        assert torch.equal(found.validity(name), seen)
        assert torch.equal(found.values[name][seen], held[seen])
        assert seen.any()
        # The ring joins them as bytes.
        assert all(part.is_contiguous() for part in found.values.parts[name])
        assert sum(part.numel() for part in found.values.parts[name]) == len(raw)
    assert sent(found) == sent(whole)


def sent(reading: Reading) -> dict[str, list[float | None]]:
    """The columns on the wire; None where nothing was observed."""
    ring: Ring[StepNote] = Ring(torch.device("cpu"))
    book = LayoutBook("r", 0)
    book.update(COLUMNS, [], 0, 0)
    places = reading.values.places.host if isinstance(reading.values, Pieces) and reading.values.places else None
    note = StepNote(
        step=1, attempt=0, layout=book.current, time_unix=1.0, zero_is_unseen=reading.zero_is_unseen, places=places
    )  # fmt: skip
    assert ring.push(device_values({}, reading), note)
    ((found, values),) = list(ring.poll())
    frame = build_frame("r", 0, found, values)
    unpacked = {name: columns.unpack(held) for name, held in frame.columns.items()}
    return {
        name: [value if flag else None for value, flag in zip(held.tolist(), valid.tolist(), strict=True)]
        for name, (held, valid) in unpacked.items()
    }


def test_places_of_other_columns_are_resolved_first(parts):
    statistics = parts[2]
    step(parts)
    pieces = Pieces({"amax": [torch.ones(4)]}, Places([0, 1]))
    found = statistics.add_to(Reading(values=pieces), lambda: COLUMNS)
    assert found.values["amax"].shape == (2,)
    assert found.values["quantized"].tolist() == [16, 0, 0, 16, 24, 0, 0, 24]


def test_what_changes_between_sampled_steps_is_noticed(parts):
    """Which row is which column, and how much was cast, is kept on the device from one step to the next."""
    model, extension, statistics = parts
    for rows, names in ((2, "a"), (2, "a"), (3, "a"), (3, "ab"), (3, "b"), (3, "b")):
        statistics.begin(is_sampled=True)
        for name in names:
            extension.quantize(torch.ones(rows, 8), model[name].quantizers["scaling_fwd"][0])
        found = counts(statistics)
        assert {name: row["quantized"] for name, row in found.items()} == {f"{n}:input": rows * 8 for n in names}


class Named(list[TensorColumn]):
    """Columns that count how often somebody goes through them."""

    num_walks = 0

    def __iter__(self) -> Iterator[TensorColumn]:
        self.num_walks += 1
        return super().__iter__()


@pytest.mark.parametrize("indices", [None, [9, 8, 7, 5, 4, 3, 1, 0]])
def test_another_number_of_elements_does_not_ask_again_which_row_is_which_column(parts, indices):
    """With batches of varying length it is another one in every step."""
    model, extension, statistics = parts
    columns = Named(COLUMNS)
    raw = torch.ones(NUM if indices is None else 11)
    reading = Reading(values=Pieces({"amax": [raw]}, None if indices is None else Places(indices)))
    walks, kept = [], []
    for rows in (2, 3, 3, 5):
        statistics.begin(is_sampled=True)
        for name in "ab":
            extension.quantize(torch.ones(rows, 8), model[name].quantizers["scaling_fwd"][0])
        found = statistics.add_to(reading, lambda: columns)
        wanted = [rows * 8 if column.tensor == "input" else 0 for column in COLUMNS]
        assert found.values["quantized"].tolist() == wanted
        assert found.valid["quantized"].tolist() == [number > 0 for number in wanted]
        walks.append(columns.num_walks)
        kept.append(found.valid["quantized"])
    assert walks[0] > 0
    assert walks == walks[:1] * 4
    assert all(flags is kept[0] for flags in kept)  # on a GPU, a copy less
    statistics.begin(is_sampled=True)
    extension.quantize(torch.ones(2, 8), model["b"].quantizers["scaling_fwd"][1])  # a new row
    found = statistics.add_to(reading, lambda: columns)
    assert columns.num_walks > walks[0]
    assert found.values["quantized"].tolist() == [16 if column.name == "b:weight" else 0 for column in COLUMNS]


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_step_like_the_last_one_takes_few_operations(parts):
    """Each is a launch on a GPU. Nothing is copied to the device."""
    statistics = parts[2]
    reading = Reading(values=Pieces({"amax": [torch.ones(NUM)]}), zero_is_unseen=True)
    step(parts)
    statistics.add_to(reading, lambda: COLUMNS)
    step(parts)
    with Calls() as calls:
        statistics.add_to(reading, lambda: COLUMNS)
    views = {"t", "unbind"}
    assert [name for name in calls.names if name not in views] == [
        "sum", "sum", "index_select", "index_select", "sub", "div", "div", "log10_", "mul_",
    ]  # fmt: skip
