"""update_rms: a learning rate without precedent, and the updates that follow it."""

from __future__ import annotations

import numpy as np
import pytest
from detect_runs import drive, findings, scalars

from fp8watch.detect.base import Sample
from fp8watch.detect.update_rms import UpdateRms


def schedule(num: int, warmup: int, peak: float = 1e-3) -> np.ndarray:
    steps = np.arange(1, num + 1)
    decay = 0.1 + 0.45 * (1 + np.cos(np.pi * np.clip((steps - warmup) / max(1, num - warmup), 0, 1)))
    return peak * np.minimum(steps / max(1, warmup), 1.0) * decay


def samples(rates: np.ndarray, seed: int = 0, moved: bool = True) -> list:
    rng = np.random.default_rng(seed)
    return [
        scalars(
            i + 1, learning_rate=float(r), **({"update_rms": float(r * np.exp(rng.normal(0, 0.1)))} if moved else {})
        )
        for i, r in enumerate(rates)
    ]


@pytest.mark.parametrize("warmup", [0, 1, 5, 100])
def test_an_ordinary_schedule_is_never_acted_on(warmup: int) -> None:
    restarts = np.concatenate([schedule(200, warmup), schedule(200, warmup), schedule(200, 0)])
    assert [s for s in drive(UpdateRms(), samples(restarts)) if s.severity == "act"] == []


@pytest.mark.parametrize("at", [30, 200, 350])
def test_a_jump_is_acted_on_in_its_own_step(at: int) -> None:
    rates = schedule(400, 40)
    rates[at - 1 : at + 39] *= 30
    act = [s for s in drive(UpdateRms(), samples(rates)) if s.severity == "act"]
    assert (act[0].step, act[0].onset_step) == (at, at)
    assert act[0].evidence["learning_rate_ratio"] == pytest.approx(30, rel=0.05)
    assert act[0].evidence["learning_rate_before"] == pytest.approx(rates[at - 2])
    assert act[-1].step == at + 39, "and it is over when the rate is back"


def test_a_jump_whose_updates_do_not_follow_is_a_warning() -> None:
    rates = schedule(300, 20)
    steps = samples(rates)
    for sample in steps[200:]:
        sample.scalars["learning_rate"] *= 30
    assert {s.severity for s in drive(UpdateRms(), steps)} == {"warn"}
    assert {
        s.severity for s in drive(UpdateRms(), samples(np.where(np.arange(300) > 200, 30, 1) * rates, moved=False))
    } == {"warn"}


def test_updates_as_large_as_a_tenth_of_the_parameters_are_acted_on_in_warm_up_too() -> None:
    ratios = [0.02, 0.12, 0.05, 0.15, 0.17, 0.18, 0.16]
    steps = [
        Sample(
            attempt=0,
            step=i + 1,
            scalars={"update_ratio": r, "update_rms": r / 50, "learning_rate": 1e-3},
            is_quiet=True,
        )
        for i, r in enumerate(ratios)
    ]
    (found,) = [f for f in findings(steps) if f.severity == "act"]
    assert (found.detector, found.cause, found.step, found.onset_step) == ("update_rms", "optimisation", 6, 4)
    brief = [scalars(i + 1, update_ratio=r) for i, r in enumerate([0.14, 0.12, 0.09, 0.095])]
    assert findings(brief) == [], "two steps over it are no case, from the first step on"
    healthy = [scalars(i + 1, update_ratio=r) for i, r in enumerate([0.055, 0.05, 0.04] * 20)]
    assert findings(healthy) == []
