"""What-if figures of Transformer Engine's casts, on a double of its extension."""

from __future__ import annotations

import pytest
import torch
from test_te_statistics import COLUMNS, two_layers

from fp8watch import what_if
from fp8watch.capture.source import Reading
from fp8watch.capture.statistics import Item
from fp8watch.capture.statistics import what_if as counting
from fp8watch.capture.te.statistics import TeStatistics
from fp8watch.formats import E4M3, E5M2


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
