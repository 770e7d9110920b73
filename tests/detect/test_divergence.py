"""divergence: a creeping rise without any spike, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from detect_runs import drive, findings, losses

from fp8watch.detect.divergence import Divergence


@pytest.mark.parametrize("seed", range(4))
def test_a_slow_climb_is_found_where_no_spike_rule_speaks(seed: int) -> None:  # case: NUM-02
    rng = np.random.default_rng(seed)
    climb = 2.0 * 1.002 ** np.arange(400) * (1 + 0.01 * rng.standard_normal(400))
    act = [f for f in findings(losses(climb)) if f.severity == "act"]
    assert act[0].detector == "divergence"
    assert act[0].step <= 140
    assert act[0].evidence["slope_per_point"] == pytest.approx(0.002, rel=0.3)
    assert act[0].evidence["window_steps"][1] == act[0].step
    control = 2.0 * 0.998 ** np.arange(400) * (1 + 0.01 * rng.standard_normal(400))
    assert findings(losses(control)) == []


@pytest.mark.parametrize("seed", range(4))
def test_a_random_plateau_is_silent(seed: int) -> None:
    rng = np.random.default_rng(seed)
    walk = 2.0 * np.exp(np.cumsum(rng.normal(0, 0.0005, 5000)) + rng.normal(0, 0.02, 5000))
    assert [s for s in drive(Divergence(), losses(walk)) if s.severity == "act"] == []


def test_a_spike_that_heals_is_no_drift() -> None:
    rng = np.random.default_rng(0)
    values = 3.0 * (1 + 0.01 * rng.standard_normal(500))
    values[200:240] *= np.linspace(2, 1, 40)
    assert [s for s in drive(Divergence(), losses(values)) if s.severity == "act"] == []
