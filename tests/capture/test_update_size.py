from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fp8watch.capture.update_size import MAX_ELEMENTS, MAX_PARAMETERS, UpdateSize, update_scalars


def measure(parameters, change) -> dict[str, float]:
    size = UpdateSize(parameters)
    size.before()
    with torch.no_grad():
        change()
    return finish(size)


def finish(size) -> dict[str, float]:
    sums = size.after()
    return {} if sums is None else update_scalars([value.item() for value in sums.values], sums.num_elements)


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
    assert MAX_ELEMENTS // 2 <= size._old.values.numel() <= MAX_ELEMENTS
    assert sum(len(views) for views, _ in size._runs) == MAX_PARAMETERS
    with torch.no_grad():
        noise = [torch.randn_like(p) * 1e-3 for p in parameters]
        for p, n in zip(parameters, noise, strict=True):
            p.add_(n)
    assert finish(size)["update_rms"] == pytest.approx(1e-3, rel=0.02)


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
    assert finish(size)["update_rms"] == pytest.approx(2.0)


def test_nothing_to_measure_is_not_observed():
    frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
    assert measure([frozen], lambda: None) == {}
    assert UpdateSize([nn.Parameter(torch.zeros(4))]).after() is None  # no `before`


def test_no_random_number_is_drawn():
    state = torch.get_rng_state()
    parameter = nn.Parameter(torch.zeros(100_000))
    measure([parameter], lambda: parameter.add_(1.0))
    assert torch.equal(torch.get_rng_state(), state)


def test_ratio_is_that_of_matrices_whatever_their_dtype():
    single, half = nn.Parameter(torch.full((3, 4), 2.0)), nn.Parameter(torch.full((2, 4), 2.0, dtype=torch.bfloat16))
    norm = nn.Parameter(torch.ones(5))

    def change():
        for matrix in (single, half):
            matrix.sub_(1.0)
        norm.add_(100.0)

    found = measure([norm, half, single], change)
    assert found["update_ratio"] == pytest.approx(1.0)
    assert found["update_rms"] == pytest.approx(math.sqrt((20 * 1.0 + 5 * 100.0**2) / 25))
    assert "update_ratio" not in measure([norm], lambda: norm.add_(1.0))


def test_weights_written_between_steps_are_no_update():
    parameter = nn.Parameter(torch.zeros(8, 8))
    size = UpdateSize([parameter])
    size.before()
    size.after()
    with torch.no_grad():
        parameter.fill_(7.0)  # a rollback
    size.before()
    with torch.no_grad():
        parameter.add_(0.5)
    assert finish(size)["update_rms"] == pytest.approx(0.5)


def test_storage_replaced_inside_the_step_is_not_measured():
    parameter = nn.Parameter(torch.zeros(10))
    size = UpdateSize([parameter])
    size.before()
    held, parameter.data = parameter.data, torch.ones(10)
    assert size.after() is None
    assert held.sum() == 0
