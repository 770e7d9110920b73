"""Which rule has a trouble: the first whose conditions all hold."""

from __future__ import annotations

from fp8watch.policy.schema import Policy, Rule, When
from fp8watch.policy.view import Trouble, View


def first_match(policy: Policy, trouble: Trouble, view: View) -> tuple[int, Rule] | None:
    """Position and rule, or None: no rule speaks of it."""
    for position, rule in enumerate(policy.rules):
        if matches(rule.when, trouble, view):
            return position, rule
    return None


def matches(when: When, trouble: Trouble, view: View) -> bool:
    """Whether all conditions hold for a trouble now."""
    if trouble.detector not in when.detector:
        return False
    if when.severity == "act" and trouble.severity != "act":
        return False
    if when.cause is not None and trouble.cause not in when.cause:
        return False
    if when.tensor is not None:
        worst = trouble.tensors[0].rpartition(":")[2] if trouble.tensors else ""
        if worst not in when.tensor:
            return False
    if view.step - trouble.first_step + 1 < when.for_steps:
        return False
    if when.near_warmup_steps is not None and (
        view.warmup_steps is None or trouble.onset_step > view.warmup_steps + when.near_warmup_steps
    ):
        return False
    return when.params_nonfinite is None or when.params_nonfinite == view.params_nonfinite
