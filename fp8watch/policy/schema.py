"""The policy file as types: mode, budgets, and rules that lead from a finding to a ladder of actions.

Errors are found by pydantic and given their line by `fp8watch.policy.load`.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from fp8watch.policy.rungs import AnyRung, Steps, Strict
from fp8watch.records import DETECTORS, Cause, Mode, Severity

MODE_RANK: dict[Mode, int] = {"observe": 0, "approve": 1, "auto": 2}


def lower_mode(first: Mode, second: Mode | None) -> Mode:
    """The more careful of two modes; None leaves the first as it is."""
    return first if second is None or MODE_RANK[second] >= MODE_RANK[first] else second


def _as_tuple(value: Any) -> Any:
    """`x` and `[x]` mean the same."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def known_detectors(names: tuple[str, ...]) -> tuple[str, ...]:
    """The same names. Raises `ValueError` with the nearest known name for one that is unknown."""
    unknown = [name + meant(name, DETECTORS) for name in names if name not in DETECTORS]
    if unknown:
        raise ValueError(f"unknown detector {', '.join(unknown)}; known: {', '.join(DETECTORS)}")
    return names


def meant(name: str, known: Iterable[str]) -> str:
    """` (did you mean x?)` where a known name is near, else nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""


class Budgets(Strict):
    """How much may be done. Zero means never; what is over is recorded and handled as `when_spent` says."""

    actions_per_1000_steps: Annotated[int, Field(ge=0)] = 4
    rollbacks_per_24h: Annotated[int, Field(ge=0)] = 2
    rollbacks_per_checkpoint: Annotated[int, Field(ge=0)] = 1
    when_spent: Literal["observe", "approve", "halt"] = "observe"
    """observe: write it down and go on watching. approve: ask a person for every further action. halt: stop the run
    once the actions are spent (a rollback over its budget is passed over, for the rungs behind it cost less)."""


class Approval(Strict):
    """How long an action waits for a person, and what happens when nobody answers: both must be said."""

    timeout_steps: Annotated[int, Field(ge=1, le=10_000_000)]
    """Optimizer steps; a pause for an evaluation does not count."""
    default: Literal["refuse", "apply"]
    """What silence means."""


class Quiet(Strict):
    """Times in which nothing is begun. Detectors go on, and what is found is acted on afterwards if it still lasts."""

    in_warmup: bool = False
    """True: not while the schedule warms up (where that is known)."""
    after_start_steps: Steps = 0
    """Steps after a resume or rollback."""
    after_evaluation_steps: Steps = 0
    """Steps after an evaluation: its activations are still in the amax windows. (While it runs there are no steps.)"""
    still_acts_on: tuple[str, ...] = ("nonfinite", "scale_frozen", "rank_mismatch")
    """Detectors that know no quiet: what they see does not heal, and every step makes it worse."""

    @field_validator("still_acts_on", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return _as_tuple(value)

    @field_validator("still_acts_on")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return known_detectors(value)


class When(Strict):
    """Conditions on an incident; all given ones must hold, absent ones hold always."""

    detector: tuple[str, ...]
    severity: Severity = "act"
    """At least this."""
    cause: tuple[Cause, ...] | None = None
    tensor: tuple[Literal["input", "weight", "output", "grad_output", "grad_input"], ...] | None = None
    """Class of the worst tensor."""
    scope: tuple[Literal["tensor", "layer", "run", "rank"], ...] | None = None
    """What the finding names: tensors, layers without a tensor, one rank only, or none of these (`run`)."""
    layers: tuple[Annotated[str, Field(min_length=1)], ...] | None = None
    """Patterns (`blocks.*.mlp.down`); one of the layers concerned fits one of them."""
    for_steps: Annotated[int, Field(ge=1)] = 1
    """The incident is at least so many steps old."""
    near_warmup_steps: Steps | None = None
    """In warm-up or at most so many steps after it. 0: in warm-up only. Never holds where the warm-up is unknown."""
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
    """One rule; the first that matches an incident has it."""

    name: Annotated[str, Field(min_length=1, max_length=80)]
    when: When
    mode: Mode | None = None
    """Can only lower the file's mode."""
    approval: Approval | None = None
    """In the place of the file's."""
    ladder: list[AnyRung] = Field(default_factory=list)
    """Taken in order. Empty: note it and do nothing."""


class Policy(Strict):
    """A whole policy file."""

    version: Literal[1]
    mode: Mode = "observe"
    budgets: Budgets = Budgets()
    approval: Approval = Approval(timeout_steps=1000, default="refuse")
    quiet: Quiet = Quiet()
    healthy_steps: Annotated[int, Field(ge=0)] = 8
    """Steps a checkpoint must have behind it without an act finding (or the onset of one) before it is good."""
    rules: list[Rule] = Field(default_factory=list)

    @model_validator(mode="after")
    def _names_are_unique(self) -> Policy:
        doubled = [name for name, count in Counter(rule.name for rule in self.rules).items() if count > 1]
        if doubled:
            raise ValueError(f"two rules named {', '.join(doubled)}")
        return self

    def approval_of(self, rule: Rule) -> Approval:
        """How long this rule's actions wait for a person."""
        return rule.approval or self.approval

    def rule_mode(self, rule: Rule) -> Mode:
        """The mode in force for a rule."""
        return lower_mode(self.mode, rule.mode)


def arms_skip_update(policy: Policy) -> bool:
    """Whether a rank shall skip optimizer steps on a non-finite gradient by itself: a rule in auto has that rung."""
    return any(
        rung.action == "skip_update" and rung.max_consecutive > 0
        for rule in policy.rules
        if policy.rule_mode(rule) == "auto"
        for rung in rule.ladder
    )
