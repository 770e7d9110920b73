"""What-if figures of Transformer Engine's casts, on a double of its extension."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from test_te_statistics import COLUMNS, Extension, Linear, two_layers

from fp8watch import what_if
from fp8watch.capture import what_if as log
from fp8watch.capture.source import Reading
from fp8watch.capture.statistics import Item
from fp8watch.capture.statistics import what_if as counting
from fp8watch.capture.te.statistics import TeStatistics
from fp8watch.formats import E4M3, E5M2
from fp8watch.records import TensorColumn


@pytest.fixture
def parts():
    yield from two_layers(400.0)


def figures(statistics: TeStatistics, figure: str) -> dict[str, list[float]]:
    """`module:tensor` -> the figure under each candidate, of the tensors that were looked at."""
    reading = statistics.add_to(Reading(values={"amax": torch.ones(len(COLUMNS))}), lambda: COLUMNS)
    names = [what_if.column(name, figure) for name in what_if.CANDIDATES]
    if names[0] not in reading.values:
        return {}
    return {
        column.name: [reading.values[name][i].item() for name in names]
        for i, column in enumerate(COLUMNS)
        if reading.valid[names[0]][i]
    }


def cast(extension, model, name: str, key: str, slot: int, values: torch.Tensor) -> None:
    extension.quantize(values, model[name].quantizers[key][slot])


def test_each_cast_is_compared_with_its_own_scale_and_format(parts):
    model, extension, statistics = parts
    inputs, gradient = torch.randn(4, 130) * 3, torch.randn(4, 8) * 1e-4
    statistics.begin(is_sampled=True)
    assert statistics.look_closer(None)
    cast(extension, model, "a", "scaling_fwd", 0, inputs)
    cast(extension, model, "b", "scaling_bwd", 0, gradient)
    for figure in ("saturated", "underflowed"):
        expected = {
            "a:input": counting.what_if(Item(values=inputs, scale=torch.tensor(400.0), fmt=E4M3)),
            "b:grad_output": counting.what_if(Item(values=gradient, scale=torch.tensor(0.01), fmt=E5M2)),
        }
        found = figures(statistics, figure)
        assert found == {name: getattr(made, figure).tolist() for name, made in expected.items()}
    assert figures(statistics, "saturated")["a:input"][0] > 0 == figures(statistics, "saturated")["a:input"][3]
    assert figures(statistics, "underflowed")["b:grad_output"][2] == 0  # the current scale would lose nothing


def test_only_what_was_asked_for_is_looked_at_and_for_one_step(parts):
    model, extension, statistics = parts
    for step in range(3):
        statistics.begin(is_sampled=True)
        if step == 1:
            assert statistics.look_closer(["b"])
        for name in ("a", "b"):
            cast(extension, model, name, "scaling_fwd", 0, torch.ones(2, 8))
            cast(extension, model, name, "scaling_fwd", 1, torch.ones(2, 8))
        assert list(figures(statistics, "snr")) == ([] if step != 1 else ["b:input", "b:weight"])
    statistics.begin(is_sampled=False)
    assert not statistics.look_closer(None)


def test_a_first_look_in_inference_mode_leaves_nothing_that_later_steps_cannot_write_to(parts):
    """Sampling with the model in training mode, as for reinforcement learning."""
    model, extension, statistics = parts
    statistics.begin(is_sampled=True)
    statistics.look_closer(None)
    with torch.inference_mode():
        cast(extension, model, "a", "scaling_fwd", 0, torch.full((2, 8), 1e-6))
    assert figures(statistics, "underflowed")["a:input"][0] == 16
    for _ in range(2):
        statistics.begin(is_sampled=True)
        statistics.look_closer(None)
        cast(extension, model, "a", "scaling_fwd", 0, torch.full((2, 8), 1e-6))
        assert figures(statistics, "underflowed")["a:input"][0] == 16
    statistics.begin(is_sampled=False)
    assert statistics._tap.num_failures == 0


def test_threads_that_look_at_their_first_casts_at_once_lose_nothing(monkeypatch):
    """One thread's columns are met, and get memory, while another one adds to its own."""
    num = 60
    monkeypatch.setattr(log, "ROOM", 8, raising=False)
    model, extension = torch.nn.ModuleDict({f"m{i}": Linear(1.0) for i in range(num)}), Extension()
    statistics = TeStatistics(model, extension=extension)
    statistics._kernel = None
    values = torch.full((2, 8), 1e-6)
    wide = [
        TensorColumn(module=f"m{i}", tensor="input", block="0", fp8_format="e4m3") for i in range(num)
    ]  # fmt: skip
    together = threading.Barrier(2)

    def slow(function):
        def slowed(*args, **options):
            made = function(*args, **options)
            if made.dtype is torch.int64:  # counts, which the other thread may add to now
                time.sleep(0.01)
            return made

        return slowed

    def work(first: int) -> None:
        together.wait()
        for i in range(first, num, 2):
            for _ in range(2):
                extension.quantize(values, model[f"m{i}"].quantizers["scaling_fwd"][0])

    try:
        statistics.begin(is_sampled=True)
        statistics.look_closer(None)
        monkeypatch.setattr(torch, "zeros", slow(torch.zeros))
        monkeypatch.setattr(torch.nn.functional, "pad", slow(torch.nn.functional.pad))
        threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        reading = statistics.add_to(Reading(values={"amax": torch.ones(num)}), lambda: wide)
        name = what_if.column("margin_1", "underflowed")
        assert reading.values[name].tolist() == [32] * num
        assert reading.valid[name].all()
        assert statistics._tap.num_failures == 0
    finally:
        statistics.detach()
