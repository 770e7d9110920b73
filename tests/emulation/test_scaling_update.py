"""Scale update against an independent reference of Transformer Engine's fused kernel (delayed_scaling.cu)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8watch.emulation import DelayedScaling, ScalingState
from fp8watch.formats import E4M3, E5M2

F32 = np.float32
AMAXES = st.one_of(
    st.sampled_from([0.0, math.inf, 1e-45, 1e-39, 3e38]), st.floats(2.0**-30, 2.0**30, width=32), st.just(0.0)
)


def kernel(
    history: npt.NDArray[F32], scale: npt.NDArray[F32], fp8_max: float, margin: float, algorithm: str
) -> tuple[npt.NDArray[F32], npt.NDArray[F32]]:
    """One launch, written down thread by thread as the kernel reads."""
    history, scale = history.copy(), scale.copy()
    length = history.shape[0]
    scaled_max = F32(fp8_max * 2.0**-margin)
    for column in range(history.shape[1]):
        last = history[0, column]
        if last == 0:
            continue
        old = history[:, column].copy()
        amax = F32(0)
        for i in range(length):
            a = old[i + 1] if i < length - 1 else last
            amax = np.fmax(amax, a)
            history[i, column] = a if i > 0 else 0
        if algorithm == "most_recent":
            amax = last
        if np.isfinite(amax) and amax > 0:
            with np.errstate(over="ignore"):
                scale[column] = scaled_max / amax
            if np.isinf(scale[column]):
                scale[column] = np.finfo(F32).max
    return history, scale


@settings(deadline=None)
@given(
    amaxes=st.lists(st.tuples(AMAXES, AMAXES), min_size=1, max_size=12),
    length=st.integers(1, 5),
    algorithm=st.sampled_from(["max", "most_recent"]),
    margin=st.sampled_from([0.0, 1.0, 3.0, -1.0, 0.5]),
    fmt=st.sampled_from([E4M3, E5M2]),
)
def test_update_is_the_kernel(
    amaxes: list[tuple[float, float]], length: int, algorithm: Any, margin: float, fmt: Any
) -> None:
    recipe = DelayedScaling(amax_history_len=length, amax_compute_algo=algorithm, margin=margin)
    state = ScalingState(("input", "weight"), fmt, length, torch.device("cpu"))
    history, scale = np.zeros((length, 2), F32), np.ones(2, F32)
    for pair in amaxes:
        state.record(torch.tensor(pair))
        history[0] = np.fmax(history[0], np.array(pair, F32))
        state.update(recipe, state.amax_history[0].clone())
        history, scale = kernel(history, scale, fmt.max, margin, algorithm)
        np.testing.assert_array_equal(state.amax_history.numpy(), history)
        np.testing.assert_array_equal(state.scale.numpy(), scale)


def run(state: ScalingState, recipe: DelayedScaling, *amaxes: float) -> list[float]:
    scales = []
    for amax in amaxes:
        state.record(torch.tensor([amax]))
        state.update(recipe, state.amax_history[0].clone())
        scales.append(float(state.scale[0]))
    return scales


def fresh(length: int) -> ScalingState:
    return ScalingState(("grad_output",), E4M3, length, torch.device("cpu"))


def test_newest_lies_last_and_a_history_of_one_is_empty_after_the_update() -> None:
    long, short = fresh(4), fresh(1)
    run(long, DelayedScaling(), 1.0, 2.0)
    run(short, DelayedScaling(), 1.0, 2.0)
    assert long.amax_history.flatten().tolist() == [0.0, 0.0, 1.0, 2.0]
    assert short.amax_history.flatten().tolist() == [0.0]
    assert float(short.scale) == 224.0


def test_infinity_freezes_the_scale_until_it_leaves_the_window() -> None:
    state, recipe = fresh(3), DelayedScaling(amax_history_len=3)
    assert run(state, recipe, 1.0, math.inf, 8.0, 8.0, 8.0) == [448.0, 448.0, 448.0, 448.0, 56.0]


def test_purge_frees_the_scale_at_once() -> None:
    state, recipe = fresh(64), DelayedScaling(amax_history_len=64)
    run(state, recipe, 1.0, math.inf, 8.0)
    state.newest_amax.fill_(8.0)
    state.purge(recipe)
    assert float(state.scale) == 56.0
    assert run(state, recipe, 16.0) == [28.0]


def test_purge_without_any_clean_amax_keeps_the_scale() -> None:
    state = fresh(2)
    state.scale.fill_(5.0)
    state.amax_history.fill_(math.inf)
    state.purge(DelayedScaling())
    assert float(state.scale) == 5.0


def test_margin_is_read_live() -> None:
    state, recipe = fresh(4), DelayedScaling(amax_history_len=4)
    run(state, recipe, 1.0)
    recipe.margin = 3.0
    assert run(state, recipe, 1.0) == [448.0 / 8]


def test_state_is_restored_in_place_or_not_at_all() -> None:
    state = fresh(4)
    run(state, DelayedScaling(), 1.0, 3.0)
    saved = state.state_dict()
    scale, history = state.scale, state.amax_history
    run(state, DelayedScaling(), 100.0)
    state.load_state_dict(saved)
    assert state.scale is scale
    assert state.amax_history is history
    assert history.flatten().tolist() == [0.0, 0.0, 1.0, 3.0]
    with pytest.raises(ValueError, match="amax_history"):
        fresh(5).load_state_dict(saved)


@pytest.mark.parametrize(
    "wrong", [{"margin": math.nan}, {"fp8_format": "E5M2"}, {"amax_history_len": 0}, {"amax_compute_algo": "mean"}]
)
def test_recipe_refuses_what_it_does_not_know(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DelayedScaling(**wrong)
