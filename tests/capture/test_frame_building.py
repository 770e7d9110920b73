from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fp8watch import columns
from fp8watch.capture.frames import COLUMN_DTYPES, LayoutBook, StepNote, build_frame, device_values
from fp8watch.capture.ring import Ring
from fp8watch.capture.scalars import NotAScalar, StepScalars, as_scalar, mean
from fp8watch.capture.source import Reading
from fp8watch.records import TensorColumn


def make_columns(count: int, **fields) -> list[TensorColumn]:
    return [TensorColumn(module=f"m{i}", tensor="input", block="0", fp8_format="e4m3", **fields) for i in range(count)]


def through_the_ring(scalars, reading, layout):
    ring: Ring[StepNote] = Ring(torch.device("cpu"))
    note = StepNote(step=3, attempt=1, layout=layout, time_unix=5.0, scalars={"tokens": 8.0}, updates_forward=2)
    assert ring.push(device_values(scalars, reading), note)
    ((found, values),) = list(ring.poll())
    return build_frame("r", 4, found, values)


def test_every_column_arrives_with_its_type_and_validity():
    book = LayoutBook("r", 4)
    book.update(make_columns(9), [], 0, 1)
    values = {
        name: torch.arange(9, dtype=torch.int64 if kind == "u8" else torch.uint8 if kind == "u1" else torch.float32)
        for name, kind in COLUMN_DTYPES.items()
    }
    valid = {"amax": torch.tensor([True, False] * 4 + [True]), "quantized": torch.zeros(9, dtype=torch.bool)}
    frame = through_the_ring({"loss": torch.tensor(math.nan)}, Reading(values=values, valid=valid), book.current)
    assert (frame.run, frame.rank, frame.step, frame.attempt, frame.updates_forward) == ("r", 4, 3, 1, 2)
    assert math.isnan(frame.scalars["loss"])
    assert frame.scalars["tokens"] == 8.0
    for name, kind in COLUMN_DTYPES.items():
        found, is_valid = columns.unpack(frame.columns[name])
        assert frame.columns[name].dtype == kind
        assert found.tolist() == list(range(9))
        assert is_valid.tolist() == valid.get(name, torch.ones(9, dtype=torch.bool)).tolist()
    assert frame.scalars["bf16_modules"] == 8.0  # every flag but the first is set


def test_counts_stay_exact_beyond_float_precision():
    book = LayoutBook("r", 0)
    book.update(make_columns(1), [], 0, 0)
    frame = through_the_ring({}, Reading(values={"quantized": torch.tensor([2**40 + 1])}), book.current)
    assert columns.unpack(frame.columns["quantized"])[0].tolist() == [2**40 + 1]


def test_no_fp8_module_is_no_column():
    frame = through_the_ring({"loss": torch.tensor(1.0)}, None, LayoutBook("r", 0).current)
    assert frame.columns == {}
    assert "bf16_modules" not in frame.scalars


def test_layout_is_announced_again_only_when_something_changed():
    book = LayoutBook("r", 0)
    found = make_columns(3)
    assert book.update(found, [], 0, 0)
    first = book.current
    assert not book.update(list(found), [], 0, 0)
    assert book.current is first
    assert book.update(make_columns(3, margin=1.0), [], 0, 0)  # the recipe was changed in place
    assert book.current.layout_id == first.layout_id + 1
    assert book.update(make_columns(3, margin=1.0), ["x: why"], 1, 0)
    assert book.current.layout_id == first.layout_id + 1
    assert (book.current.observed_modules, book.current.expected_modules) == (3, 4)
    assert book.update(make_columns(3, margin=1.0), ["x: why"], 1, 1)
    assert book.current.attempt == 1


def test_mean_of_mixed_micro_batches():
    assert mean([1.0, 2.0, 6.0]) == 3.0
    found = mean([torch.tensor(1.0, dtype=torch.float64), 2.0, torch.tensor(6.0, dtype=torch.bfloat16)])
    assert isinstance(found, torch.Tensor)
    assert found.item() == 3.0


def test_scalars_of_a_step_do_not_leak_into_the_next():
    scalars = StepScalars()
    scalars.micro_loss(1.0)
    scalars.put("grad_norm", torch.tensor(2.0))
    scalars.put("loss_scale", None)
    assert scalars.take() == ({}, {"grad_norm": torch.tensor(2.0)})
    scalars.loss(4.0)
    assert scalars.take()[0] == {"loss": 4.0}


@pytest.mark.parametrize("value", [True, np.int64(3), np.bool_(True), torch.tensor(3), torch.tensor(True)])
def test_whole_numbers_and_flags_are_numbers(value):
    assert float(as_scalar(value)) == float(value)


@pytest.mark.parametrize("value", [None, "1", b"1", [1.0], np.array(["a"]), object()])
def test_what_is_no_number_says_what_is_wanted(value):
    with pytest.raises(NotAScalar, match="wants one number"):
        as_scalar(value)


def test_a_loss_with_a_pending_negation_is_its_value():
    """The kernel that brings a step to the host reads memory as it is."""
    lazy = torch.tensor([1.0 + 2.0j]).conj().imag[0]
    assert lazy.is_neg()
    scalars = StepScalars()
    scalars.loss(lazy)
    _, device = scalars.take()
    assert device["loss"].item() == -2.0
    assert not device["loss"].is_neg()
