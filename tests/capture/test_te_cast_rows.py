"""Where casts are counted: rows keep their place while a step is counted, on however many threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from standin_te.tensors import Float8TensorStorage
from test_te_statistics import Extension, Linear
from torch.multiprocessing.reductions import StorageWeakRef

from fp8watch.capture.source import Reading
from fp8watch.capture.te import cast_rows
from fp8watch.capture.te.cast_rows import NUM_COUNTS, NUM_SUMS, CastRow, CastRows
from fp8watch.capture.te.statistics import TeStatistics
from fp8watch.records import TensorColumn

CPU = torch.device("cpu")
MANY = 3 * cast_rows.ROOM + 5


def fill(rows: CastRows, num: int) -> list[CastRow]:
    return [rows.row((f"module{i}", "input")) for i in range(num)]


def add(counts: torch.Tensor, sums: torch.Tensor, number: int) -> None:
    """What a cast's kernel adds, the first part in each program: the row's number plus 1."""
    counts += (number + 1) * torch.arange(1, NUM_COUNTS + 1)
    sums += (number + 1) * torch.arange(1, NUM_SUMS + 1)


def check(rows: CastRows, programs: int, times: int = 1) -> None:
    counts, sums = rows.totals()
    for row in rows:
        assert counts[row.number].tolist() == [times * programs * (row.number + 1) * i for i in (1, 2, 3, 4)]
        assert sums[row.number].tolist() == [times * programs * (row.number + 1) * i for i in (1, 2)]


@pytest.mark.parametrize("programs", [1, 3])
def test_a_row_keeps_its_place_until_the_step_is_over(programs):
    rows = CastRows(CPU, programs)
    held = [(row.counts, row.sums, row.counts_at, row.sums_at, row.number) for row in fill(rows, 2)]
    assert len(fill(rows, MANY)) == len(rows) == MANY
    for counts, sums, counts_at, sums_at, number in held:  # a thread that was about to add
        assert (counts.data_ptr(), sums.data_ptr()) == (counts_at, sums_at)
        add(counts, sums, number)
    for row in list(rows)[2:]:
        add(row.counts, row.sums, row.number)
    check(rows, programs)


@pytest.mark.parametrize("programs", [1, 3])
def test_the_next_step_has_all_rows_in_one_memory_just_large_enough(programs):
    rows = CastRows(CPU, programs)
    for num in (MANY, MANY, MANY + 1, MANY + 1):
        rows.clear()
        found = fill(rows, num)
        for row in found:
            assert (row.counts_at, row.sums_at) == (row.counts.data_ptr(), row.sums.data_ptr())
            assert (row.counts_at | row.sums_at) % 8 == 0
            add(row.counts, row.sums, row.number)
        check(rows, programs)
    (storage,) = {row.counts.untyped_storage().data_ptr(): row.counts.untyped_storage() for row in rows}.values()
    assert storage.nbytes() == (MANY + 1) * programs * (4 * NUM_SUMS + (8 if programs == 1 else 4) * NUM_COUNTS)
    counts, sums = rows.totals()
    assert (counts.shape, sums.shape) == ((MANY + 1, NUM_COUNTS), (MANY + 1, NUM_SUMS))
    assert (counts.dtype, sums.dtype) == (torch.int64, torch.float32)


def test_memory_for_many_columns_stays_small() -> None:
    rows, programs, num = CastRows(CPU, 528), 528, 1680
    needed = num * programs * 4 * (NUM_COUNTS + NUM_SUMS)
    for _ in range(2):
        fill(rows, num)
        storages = {row.counts.untyped_storage().data_ptr(): row.counts.untyped_storage() for row in rows}.values()
        assert needed <= sum(storage.nbytes() for storage in storages) < 1.1 * needed < 24e6
        rows.clear()


def test_memory_that_rows_have_left_is_kept_for_one_more_step() -> None:
    """A kernel on another stream may not have added yet, nor another thread launched what it was about to."""
    model, extension = torch.nn.ModuleList(Linear(1.0) for _ in range(MANY)), Extension()
    statistics = TeStatistics(model, extension=extension)

    def step(*, is_sampled: bool) -> list[StorageWeakRef]:
        statistics.begin(is_sampled=is_sampled)
        for module in model:
            extension.quantize(torch.ones(2, 8), module.quantizers["scaling_fwd"][0])
        rows = () if statistics.rows is None else statistics.rows
        return [StorageWeakRef(row.counts.untyped_storage()) for row in rows]

    try:
        before = step(is_sampled=True)
        after = step(is_sampled=True)
        assert len({ref.cdata for ref in before}) == 4
        assert len({ref.cdata for ref in after}) == 1
        assert not any(ref.expired() for ref in before)
        step(is_sampled=False)
        assert all(ref.expired() for ref in before)
        assert not after[0].expired()
        model.append(Linear(1.0))
        step(is_sampled=True)
        step(is_sampled=True)
        assert not after[0].expired()
        step(is_sampled=True)
        assert after[0].expired()
    finally:
        statistics.detach()


def test_without_memory_for_joining_them_the_rows_stay_where_they_are(monkeypatch):
    rows, asked = CastRows(CPU, 1), []
    fill(rows, MANY)

    def none_left(self: CastRows, room: int) -> Any:
        asked.append(room)
        raise torch.OutOfMemoryError

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(CastRows, "_allocate", none_left)
            rows.clear()
        for row in rows:
            add(row.counts, row.sums, row.number)
        check(rows, 1)
    assert asked == [MANY]  # each time would be a wait for the device
    for num in (4 * cast_rows.ROOM + 1, 4 * cast_rows.ROOM + 2):
        fill(rows, num)
        rows.clear()
        assert len({row.counts.untyped_storage().data_ptr() for row in rows}) == 1


class Watched:
    """A model of many modules whose casts are counted; `number` of its elements as the statistics have it."""

    def __init__(self, extension: Extension) -> None:
        self.model = torch.nn.ModuleDict({f"m{i}": Linear(1.0) for i in range(MANY)})
        self.statistics = TeStatistics(self.model, extension=extension)
        self.statistics._kernel = None

    def quantizer(self, i: int) -> Any:
        return self.model[f"m{i}"].quantizers["scaling_fwd"][0]

    def counted(self) -> list[tuple[int, int]]:
        """Elements and those that were lost to zero, of the inputs that were counted."""
        columns = [TensorColumn(module=name, tensor="input", block="0", fp8_format="e4m3") for name in self.model]
        reading = self.statistics.add_to(Reading(values={"amax": torch.ones(MANY)}), lambda: columns)
        assert reading is not None
        names = ("quantized", "underflowed")
        return list(zip(*(reading.values[name][reading.valid[name]].tolist() for name in names), strict=True))


def test_columns_discovered_by_one_thread_do_not_lose_what_another_one_counts(monkeypatch):
    """As the backward pass, on autograd's thread, while the forward pass of another micro-batch runs."""
    watched, extension = None, Extension()
    watched = Watched(extension)
    is_counting, is_discovered = threading.Event(), threading.Event()

    def kernel(row: CastRow, values: torch.Tensor, *_: Any, **__: Any) -> bool:
        """A slow one: it knows where to add, and adds later."""
        counts = row.counts[0]
        is_counting.set()
        assert row.key != ("m0", "input") or is_discovered.wait(30)
        counts += torch.tensor([0, values.numel(), 0, 0])
        return True

    watched.statistics._kernel = type("Kernel", (), {"add": staticmethod(kernel), "PROGRAMS": 1})
    watched.statistics.begin(is_sampled=True)
    thread = threading.Thread(target=extension.quantize, args=(torch.full((2, 8), 1e-6), watched.quantizer(0)))
    try:
        thread.start()
        assert is_counting.wait(30)
        for i in range(1, MANY):
            extension.quantize(torch.full((2, 8), 1e-6), watched.quantizer(i))
        is_discovered.set()
        thread.join()
        assert watched.counted() == [(16, 16)] * MANY
    finally:
        is_discovered.set()
        watched.statistics.detach()


class Slow(Extension):
    """The source of an activation takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.may_go_on = threading.Event(), threading.Event()

    def gelu(self, x: torch.Tensor, quantizer: Any) -> torch.Tensor | Float8TensorStorage:
        if quantizer is None:
            self.is_asked.set()
            assert self.may_go_on.wait(30)
        return super().gelu(x, quantizer)


def test_a_cast_is_counted_while_another_thread_asks_for_the_source_of_its_own() -> None:
    extension = Slow()
    watched = Watched(extension)
    watched.statistics.begin(is_sampled=True)
    thread = threading.Thread(target=extension.gelu, args=(torch.ones(2, 8), watched.quantizer(0)))
    try:
        thread.start()
        assert extension.is_asked.wait(30)
        extension.quantize(torch.full((4, 8), 1e-6), watched.quantizer(1))
        extension.may_go_on.set()
        thread.join()
        assert watched.counted() == [(16, 0), (32, 32)]
        assert extension.calls == 2
    finally:
        extension.may_go_on.set()
        watched.statistics.detach()
