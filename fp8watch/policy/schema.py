"""The policy file as types: mode, budgets, and rules that lead from a finding to a ladder of actions.

Pydantic finds the errors; `fp8watch.policy.load` gives them their lines.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from fp8watch.policy.rungs import AnyRung, Rung, Steps, Strict
from fp8watch.records import DETECTORS, Cause, Mode, Severity

MODE_RANK: dict[Mode, int] = {"observe": 0, "approve": 1, "auto": 2}


def lower_mode(first: Mode, second: Mode | None) -> Mode:
    """The more careful of two modes; None leaves the first unchanged."""
    return first if second is None or MODE_RANK[second] >= MODE_RANK[first] else second


def _as_tuple(value: Any) -> Any:
    """Treat `x` like `[x]`."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def known_detectors(names: tuple[str, ...]) -> tuple[str, ...]:
    """The same names. Raises `ValueError` for an unknown one, with the nearest known name."""
    unknown = [name + meant(name, DETECTORS) for name in names if name not in DETECTORS]
    if unknown:
        raise ValueError(f"unknown detector {', '.join(unknown)}; known: {', '.join(DETECTORS)}")
    return names


def meant(name: str, known: Iterable[str]) -> str:
    """` (did you mean x?)` where a known name is near, else empty."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""


class Budgets(Strict):
    """How much may be done. Zero means never; an action over budget is recorded and handled as `when_spent` says."""

    actions_per_1000_steps: Annotated[int, Field(ge=0)] = 4
    rollbacks_per_24h: Annotated[int, Field(ge=0)] = 2
    rollbacks_per_checkpoint: Annotated[int, Field(ge=0)] = 1
    when_spent: Literal["observe", "approve", "halt"] = "observe"
    """observe: record the action and keep watching. approve: ask a person about every further action. halt: stop the
    run once the actions are spent (a rollback over its own budget is passed over, because the rungs after it cost
    less)."""


class Approval(Strict):
    """How long an action waits for a person, and what happens when nobody answers. Both must be given."""

    timeout_steps: Annotated[int, Field(ge=1, le=10_000_000)]
    """Optimizer steps; a pause for an evaluation does not count."""
    default: Literal["refuse", "apply"]
    """What to do when nobody answers."""


class Quiet(Strict):
    """Times in which nothing is begun. Detectors continue, and a finding that still lasts afterwards is acted on
    then."""

    in_warmup: bool = False
    """True: nothing is begun while the schedule warms up (where that is known)."""
    after_start_steps: Steps = 0
    """Steps after a resume or rollback."""
    after_evaluation_steps: Steps = 0
    """Steps after an evaluation: its activations are still in the amax windows. (While it runs there are no steps.)"""
    still_acts_on: tuple[str, ...] = ("nonfinite", "scale_frozen", "rank_mismatch")
    """Detectors that quiet times do not hold back: what they see does not heal, and every step makes it worse."""

    @field_validator("still_acts_on", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return _as_tuple(value)

    @field_validator("still_acts_on")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return known_detectors(value)


class When(Strict):
    """Conditions on an incident; all given ones must hold, absent ones always hold."""

    detector: tuple[str, ...]
    severity: Severity = "act"
    """At least this severity."""
    cause: tuple[Cause, ...] | None = None
    tensor: tuple[Literal["input", "weight", "output", "grad_output", "grad_input"], ...] | None = None
    """Kind of the worst tensor."""
    scope: tuple[Literal["tensor", "layer", "run", "rank"], ...] | None = None
    """What the finding names: tensors, layers without a tensor, one rank only, or none of these (`run`)."""
    layers: tuple[Annotated[str, Field(min_length=1)], ...] | None = None
    """Patterns (`blocks.*.mlp.down`); at least one affected layer matches one of them."""
    for_steps: Annotated[int, Field(ge=1)] = 1
    """The incident is at least this many steps old."""
    near_warmup_steps: Steps | None = None
    """In warm-up, or at most this many steps after it. 0: in warm-up only. Never holds where the warm-up is unknown."""
    params_nonfinite: bool | None = None
    """Whether parameters have become non-finite."""

    @field_validator("detector", "cause", "tensor", "scope", "layers", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return None if value is None else _as_tuple(value)

    @field_validator("detector")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("name at least one detector")
        return known_detectors(value)


class Rule(Strict):
    """One rule; the first rule that matches an incident handles it."""

    name: Annotated[str, Field(min_length=1, max_length=80)]
    when: When
    mode: Mode | None = None
    """Can only lower the file's mode."""
    approval: Approval | None = None
    """Replaces the file's."""
    ladder: list[AnyRung] = Field(default_factory=list)
    """Rungs in order. Empty: record the incident and do nothing."""


class Policy(Strict):
    """A whole policy file."""

    version: Literal[1]
    mode: Mode = "observe"
    budgets: Budgets = Budgets()
    approval: Approval = Approval(timeout_steps=1000, default="refuse")
    quiet: Quiet = Quiet()
    healthy_steps: Annotated[int, Field(ge=0)] = 8
    """Steps without an act finding (or the onset of one) that must follow a checkpoint before it is good."""
    rules: list[Rule] = Field(default_factory=list)

    @model_validator(mode="after")
    def _names_are_unique(self) -> Policy:
        doubled = [name for name, count in Counter(rule.name for rule in self.rules).items() if count > 1]
        if doubled:
            raise ValueError(f"two rules named {', '.join(doubled)}")
        return self

    def approval_of(self, rule: Rule) -> Approval:
        """How long this rule's actions wait for a person, and what happens then."""
        return rule.approval or self.approval

    def rule_named(self, name: str) -> Rule | None:
        """The rule of this name; None: this file has none."""
        return next((rule for rule in self.rules if rule.name == name), None)

    def rung_at(self, rule: str, index: int) -> Rung | None:
        """A rung of the ladder of the rule of this name; None: behind the ladder's end, or there is no such rule."""
        known = self.rule_named(rule)
        return known.ladder[index] if known is not None and index < len(known.ladder) else None

    def rule_mode(self, rule: Rule) -> Mode:
        """The mode in force for a rule."""
        return lower_mode(self.mode, rule.mode)

    def rung_mode(self, rule: Rule, rung: Rung) -> Mode:
        """The mode in force for a rung of a rule's ladder."""
        return lower_mode(self.rule_mode(rule), rung.mode)


def first_acting(rule: Rule | None, start: int = 0) -> Rung | None:
    """The first rung from `start` on that does not only observe."""
    return next((rung for rung in (rule.ladder[start:] if rule else []) if rung.mode != "observe"), None)


def skip_limits(policy: Policy) -> list[int]:
    """How many updates in a row each `skip_update` rung in auto lets the ranks skip by themselves. Empty: none does."""
    return [
        rung.max_consecutive
        for rule in policy.rules
        for rung in rule.ladder
        if rung.action == "skip_update" and rung.max_consecutive > 0 and policy.rung_mode(rule, rung) == "auto"
    ]


def arms_skip_update(policy: Policy) -> bool:
    """Whether ranks skip optimizer steps on a non-finite gradient by themselves."""
    return bool(skip_limits(policy))
