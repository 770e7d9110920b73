"""What a policy would have proposed, had it watched a recorded run: the live decision function in observe mode.

A recording cannot react, so only first rungs are proposed and nothing is judged.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

from fp8watch.detect.base import Sample
from fp8watch.detect.pipeline import Pipeline
from fp8watch.policy.decide import decide
from fp8watch.policy.schema import Policy
from fp8watch.policy.state import PolicyState
from fp8watch.policy.view import View, trouble_of

KEPT_STEPS = 512


class Proposals:
    """Follows one run."""

    def __init__(self, run: str, policy: Policy) -> None:
        self._run = run
        self._policy = policy.model_copy(update={"mode": "observe"})
        self._state = PolicyState()
        self._seen = 0
        self._losses: deque[tuple[int, float]] = deque(maxlen=KEPT_STEPS)
        self._rates: deque[tuple[int, float, float]] = deque(maxlen=KEPT_STEPS)
        self._norms: deque[float] = deque(maxlen=64)

    def observe(self, sample: Sample, pipeline: Pipeline) -> list[dict[str, Any]]:
        """The actions proposed in this step, as they are printed."""
        self._seen += 1
        scalars = sample.scalars
        if "loss" in scalars:
            self._losses.append((sample.step, scalars["loss"]))
        if "learning_rate" in scalars:
            self._rates.append((sample.step, scalars["learning_rate"], scalars.get("lr_factor", 1.0)))
        if scalars.get("grad_norm", 0.0) < float("inf") and "grad_norm" in scalars:
            self._norms.append(scalars["grad_norm"])
        troubles = tuple(
            trouble_of(incident, name=incident.id, finding=incident.findings[-1], evidence=incident.evidence)
            for incident in pipeline.open_incidents()
        )
        if not troubles:
            return []
        view = View(
            run=self._run,
            step=sample.step,
            seen=self._seen,
            attempt=sample.attempt,
            troubles=troubles,
            modules=tuple(dict.fromkeys(column.module for column in sample.tensors)),
            tensors=tuple(column.name for column in sample.tensors),
            losses=tuple(self._losses),
            learning_rates=tuple(self._rates),
            grad_norm_median=statistics.median(self._norms) if self._norms else None,
        )
        self._state, decisions = decide(self._policy, self._state, view)
        return [
            {
                "action": decision.action,
                "step": sample.step,
                "severity": "proposal",
                "run": self._run,
                "params": decision.params,
                "rule": decision.rule,
                "finding": decision.trouble.finding if decision.trouble else None,
                "reason": decision.reason,
            }
            for decision in decisions
            if decision.kind == "propose"
        ]
