"""Which rule matches a trouble: the first whose conditions all hold; and why the others do not."""

from __future__ import annotations

from fnmatch import fnmatchcase

from fp8watch.policy.schema import Policy, Rule, When
from fp8watch.policy.view import Trouble, View

MAX_REASONS = 8
"""At most this many rules are named when it is recorded why none of them, or no earlier one, matches a trouble."""


def first_match(policy: Policy, trouble: Trouble, view: View) -> tuple[int, Rule] | None:
    """Position and rule, or None: no rule matches."""
    for position, rule in enumerate(policy.rules):
        if matches(rule.when, trouble, view):
            return position, rule
    return None


def matches(when: When, trouble: Trouble, view: View) -> bool:
    """Whether all conditions hold for a trouble now."""
    return trouble.detector in when.detector and why_not(when, trouble, view) is None


def why_not(when: When, trouble: Trouble, view: View) -> str | None:
    """The first condition that does not hold, in words that do not change from step to step; None: all hold."""
    if trouble.detector not in when.detector:
        return f"not for {trouble.detector}"
    if when.severity == "act" and trouble.severity != "act":
        return f"severity is {trouble.severity}"
    if when.cause is not None and trouble.cause not in when.cause:
        return f"cause is {trouble.cause}"
    if when.tensor is not None:
        worst = trouble.tensors[0].rpartition(":")[2] if trouble.tensors else ""
        if worst not in when.tensor:
            return f"worst tensor is {worst or 'not named'}"
    if when.scope is not None and scope_of(trouble) not in when.scope:
        return f"scope is {scope_of(trouble)}"
    if when.layers is not None and not any(fnmatchcase(name, p) for name in trouble.layers for p in when.layers):
        return "other layers"
    if view.step - trouble.first_step + 1 < when.for_steps:
        return f"not {when.for_steps} steps old"
    if (when.near_warmup_steps is not None and not view.is_warming_up) and (
        view.warmup_steps is None or trouble.onset_step > view.warmup_steps + when.near_warmup_steps
    ):
        return "not near warm-up"
    if when.params_nonfinite is not None and when.params_nonfinite != view.params_nonfinite:
        return f"parameters are {'not ' if view.params_nonfinite else ''}finite"
    return None


def scope_of(trouble: Trouble) -> str:
    """What a trouble names: `rank` (one rank only), `tensor`, `layer`, or `run`."""
    if trouble.rank is not None:
        return "rank"
    return "tensor" if trouble.tensors else "layer" if trouble.layers else "run"


def passed_over(policy: Policy, trouble: Trouble, view: View, until: int | None = None) -> str:
    """Why the rules (those before position `until`) that name the trouble's detector do not match; "" for none."""
    reasons = [
        f"{rule.name}: {why}"
        for rule in policy.rules[:until]
        if trouble.detector in rule.when.detector and (why := why_not(rule.when, trouble, view)) is not None
    ]
    more = f"; {len(reasons) - MAX_REASONS} more" if len(reasons) > MAX_REASONS else ""
    return "; ".join(reasons[:MAX_REASONS]) + more
