from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fp8watch.capture.update_size import MAX_ELEMENTS, MAX_PARAMETERS, UpdateSize


def measure(parameters, change) -> dict[str, float]:
    size = UpdateSize(parameters)
    size.before()
    with torch.no_grad():
        change()
    return {name: value.item() for name, value in size.after().items()}


@given(st.floats(1e-6, 10.0), st.integers(1, 5))
def test_rms_of_a_known_update_is_exact_on_small_models(delta, count):
    parameters = [nn.Parameter(torch.zeros(7, 3)) for _ in range(count)]
    found = measure(parameters, lambda: [p.add_(delta) for p in parameters])
    assert found["update_rms"] == pytest.approx(delta, rel=1e-5)
    assert found["param_nonfinite"] == 0.0


def test_sample_is_bounded_and_spread():
    parameters = [nn.Parameter(torch.randn(500, 500)) for _ in range(100)]
    size = UpdateSize(parameters)
    size.before()
    assert size._old is not None
    assert MAX_ELEMENTS // 2 <= size._old.numel() <= MAX_ELEMENTS
    assert len(size._old_chunks) == MAX_PARAMETERS
    with torch.no_grad():
        noise = [torch.randn_like(p) * 1e-3 for p in parameters]
        for p, n in zip(parameters, noise, strict=True):
            p.add_(n)
    assert size.after()["update_rms"].item() == pytest.approx(1e-3, rel=0.02)


def test_nonfinite_parameters_are_seen():
    parameter = nn.Parameter(torch.zeros(10))
    found = measure([parameter], lambda: parameter[3].fill_(math.nan))
    assert math.isnan(found["update_rms"])
    assert found["param_nonfinite"] == 1.0


def test_bf16_parameters_are_measured_in_float32():
    parameter = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    assert measure([parameter], lambda: parameter.add_(0.5))["update_rms"] == 0.5


def test_replaced_storage_is_followed():
    parameter = nn.Parameter(torch.zeros(10))
    size = UpdateSize([parameter])
    size.before()
    size.after()
    parameter.data = torch.zeros(10)
    size.before()
    with torch.no_grad():
        parameter.add_(2.0)
    assert size.after()["update_rms"].item() == 2.0


def test_nothing_to_measure_is_not_observed():
    frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
    assert measure([frozen], lambda: None) == {}
    assert UpdateSize([nn.Parameter(torch.zeros(4))]).after() == {}  # no `before`


def test_no_random_number_is_drawn():
    state = torch.get_rng_state()
    parameter = nn.Parameter(torch.zeros(100_000))
    measure([parameter], lambda: parameter.add_(1.0))
    assert torch.equal(torch.get_rng_state(), state)
