"""All scenarios by name."""

from __future__ import annotations

from fp8watch.demo.scenarios import activations, rates, scales, text, weights
from fp8watch.demo.scenarios.base import Fault, Scenario, Setting


def _none(setting: Setting) -> Fault:
    return Fault()


HEALTHY = Scenario(
    name="healthy",
    family="none",
    summary="no fault",
    make=_none,
    recurs="nothing to recur",
    takes_fault_step=False,
)

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        HEALTHY,
        *scales.SCENARIOS,
        *activations.SCENARIOS[:1],
        *rates.SCENARIOS,
        *text.SCENARIOS,
        *weights.SCENARIOS,
        *activations.SCENARIOS[1:],
    )
}
