"""scale_frozen: healthy recipes are silent, wrong scales are found at once, nothing is reported without evidence."""

from __future__ import annotations

import numpy as np
import pytest
from detect_runs import DelayedRun, columns, drive
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8watch.detect.scale_frozen import ScaleFrozen

RECIPES = [(1024, "max"), (16, "max"), (1, "most_recent"), (1, "max"), (16, "most_recent")]


def noise(rng: np.random.Generator, num: int) -> np.ndarray:
    return np.exp(rng.normal(0, 0.3, num))


@pytest.mark.parametrize(("history_len", "algo"), RECIPES)
def test_healthy_recipes_are_silent(history_len: int, algo: str) -> None:
    rng = np.random.default_rng(history_len)
    run = DelayedRun(columns(history_len, algo))
    drift = np.exp(np.linspace(0, -6, 1500))
    assert drive(ScaleFrozen(), (run.run(noise(rng, 6) * drift[i]) for i in range(1500))) == []


@settings(max_examples=40, deadline=None)
@given(
    recipe=st.sampled_from(RECIPES),
    skip=st.integers(0, 40),
    micro=st.integers(1, 4),
    margin=st.sampled_from([0.0, 1.0, 3.0]),
    amax=st.lists(
        st.lists(st.sampled_from([0.0, 0.03, 0.5, 1.0, 3.0, 700.0]), min_size=4, max_size=4), min_size=5, max_size=60
    ),
)
def test_whatever_the_amax_a_correct_library_is_never_accused(
    recipe: tuple[int, str], skip: int, micro: int, margin: float, amax: list[list[float]]
) -> None:
    """Also when attached in the middle of the run, with micro-batches, zeros and jumps (of less than 2^16)."""
    run = DelayedRun(columns(*recipe, modules=1, margin=margin))
    samples = [run.run([], micro=[[v[(k + j) % 4] for j in range(3)] for k in range(micro)]) for v in amax]
    assert drive(ScaleFrozen(), samples[skip:]) == []


@pytest.mark.parametrize(("history_len", "algo"), RECIPES)
@pytest.mark.parametrize("factor", [64.0, 2.0**-24])
def test_stuck_scales_are_found_in_two_steps(history_len: int, algo: str, factor: float) -> None:
    rng = np.random.default_rng(1)
    run = DelayedRun(columns(history_len, algo))
    samples = []
    for step in range(1, 131):
        if step == 100:
            run.scale *= factor
            run.is_stuck[:] = True
        samples.append(run.run(noise(rng, 6)))
    first = drive(ScaleFrozen(), samples)[0]
    assert (first.severity, first.onset_step, first.step) == ("act", 100, 101)
    assert len(first.tensors) == 6
    assert first.evidence["deviation_log2"] == pytest.approx(np.log2(factor), abs=3.0)
    assert first.evidence["directions"] == ["backward", "forward"]


def test_backward_scales_that_never_move_are_found_and_a_constant_amax_is_not() -> None:  # case: NUM-04
    tensors = columns(16, "max")
    run, still = DelayedRun(tensors), DelayedRun(tensors)
    backward = np.array([column.tensor == "grad_output" for column in tensors])
    run.is_stuck[:] = backward
    moving = [run.run(np.where(backward, 10.0 ** (1 + step / 20), 1.0)) for step in range(40)]
    symptoms = drive(ScaleFrozen(), moving)
    assert {tensors[i].tensor for i in symptoms[-1].tensors} == {"grad_output"}
    assert symptoms[-1].evidence["directions"] == ["backward"]
    assert symptoms[0].step <= 4
    assert drive(ScaleFrozen(), [still.run(np.full(6, 2.0)) for _ in range(200)]) == []


def test_attached_in_mid_run_too_large_is_certain_and_too_small_is_not() -> None:
    """An older, larger amax that we never saw may rightly keep the scale small, but not by 2^24."""
    rng = np.random.default_rng(2)
    for factor, is_found in ((8.0, True), (0.25, False), (2.0**-24, True)):
        run = DelayedRun(columns(1024, "max"))
        samples = []
        for step in range(1, 90):
            if step == 60:
                run.scale *= factor
                run.is_stuck[:] = True
            samples.append(run.run(noise(rng, 6)))
        assert bool(drive(ScaleFrozen(), samples[40:])) is is_found, factor


def test_an_infinity_in_a_long_window_is_found_although_the_scale_still_fits() -> None:
    run = DelayedRun(columns(64, "max"))
    samples = [run.run(np.ones(6)) for _ in range(50)]
    poisoned = np.ones(6)
    poisoned[3] = np.inf
    samples.append(run.run(poisoned))
    samples += [run.run(np.ones(6)) for _ in range(80)]
    symptoms = drive(ScaleFrozen(), samples)
    assert symptoms[0].step == 53
    assert symptoms[0].evidence["poisoned"] == ["blocks.1.mlp.down:input"]
    assert max(symptom.step for symptom in symptoms) <= 51 + 64, "silent once it has left the window"


def test_a_module_in_high_precision_is_not_judged_and_may_return_with_a_fresh_scale() -> None:
    rng = np.random.default_rng(3)
    run = DelayedRun(columns(16, "max"))
    samples = [run.run(noise(rng, 6)) for _ in range(40)]
    high = {"high_precision": np.array([1, 1, 1, 0, 0, 0], dtype=np.uint8)}
    for _ in range(20):
        sample = run.run(noise(rng, 6), values=dict(high))
        sample.values["scale"][:3] = 123.0
        samples.append(sample)
    for i in range(3):
        run.windows[i], run.scale[i] = [0.5], run.scale[i] * 2
    samples += [run.run(noise(rng, 6), values={"high_precision": np.zeros(6, np.uint8)}) for _ in range(40)]
    assert drive(ScaleFrozen(), samples) == []


def test_a_purged_window_is_followed_without_being_told() -> None:
    rng = np.random.default_rng(4)
    run = DelayedRun(columns(1024, "max"))
    samples = [run.run(noise(rng, 6) * (50.0 if step == 10 else 1.0)) for step in range(60)]
    for i, window in enumerate(run.windows):
        run.windows[i] = window[-8:]
    samples += [run.run(noise(rng, 6)) for _ in range(60)]
    # The update that follows the purge is the first that shows it.
    assert drive(ScaleFrozen(), samples) == []


def test_after_a_rollback_the_window_is_the_one_of_the_target() -> None:
    rng = np.random.default_rng(5)
    detector, run = ScaleFrozen(), DelayedRun(columns(64, "max"))
    state = detector.start()
    for _ in range(50):
        state, symptoms = detector.update(state, run.run(noise(rng, 6)))
    saved = ([list(window) for window in run.windows], run.scale.copy())
    for _ in range(20):
        state, symptoms = detector.update(state, run.run(noise(rng, 6) * 1000))
    run.windows, run.scale, run.step = [list(w) for w in saved[0]], saved[1].copy(), 50
    state = detector.rolled_back(state, 50)
    for _ in range(20):
        state, symptoms = detector.update(state, run.run(noise(rng, 6), attempt=1))
        assert symptoms == []
    run.is_stuck[:], run.scale = True, run.scale * 64
    for _ in range(2):
        state, symptoms = detector.update(state, run.run(noise(rng, 6), attempt=1))
    assert symptoms[0].severity == "act"


def test_a_wrong_format_maximum_is_named() -> None:  # case: NUM-15
    run = DelayedRun(columns(16, "max"))
    run.factor[:] = 448 / 240
    tensors = tuple(column for column in run.tensors)
    wrong = [type(column)(**{**_fields(column), "fp8_format": "e4m3fnuz"}) for column in tensors]
    samples = []
    for _ in range(10):
        sample = run.run(np.ones(6))
        samples.append(type(sample)(attempt=0, step=sample.step, scalars={}, tensors=tuple(wrong), values={
            "amax": sample.values["amax"], "scale": np.full(6, 448.0, np.float32)}))  # fmt: skip
    symptoms = drive(ScaleFrozen(), samples)
    assert symptoms[0].evidence["format_mismatch"] == "e4m3"


def _fields(column: object) -> dict[str, object]:
    return {name: getattr(column, name) for name in column.__struct_fields__}  # type: ignore[attr-defined]
