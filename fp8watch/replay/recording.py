"""A recorded run, whatever wrote it: its name, its steps in order, and other known facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from fp8watch.detect.base import Sample
from fp8watch.errors import BadInput
from fp8watch.policy.view import Trouble
from fp8watch.records import CheckpointRecord, Finding, TraceEntry

LEAST_ROWS = 20
"""Least number of rows for judging the order of a log."""
NOTE = "note: "
"""Prefix of lines on standard error that are not errors."""
FILTERED_NOTE = "log source: the trainer may have repaired or averaged non-finite values before logging them"


@dataclass(slots=True, kw_only=True)
class Facts:
    """Facts about a recording besides its steps; its reader updates them during the iteration."""

    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Action -> why the run could not do it. Empty for a log, which rules nothing out."""
    warmup_steps: int | None = None
    saved: list[CheckpointRecord] = field(default_factory=list)
    """Checkpoints saved since the list was last emptied; whoever uses them empties it."""
    policy: str | None = None
    """Text of the policy of the run; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One step as the detectors saw it."""

    sample: Sample
    findings: list[Finding]
    troubles: Callable[[], tuple[Trouble, ...]]
    """The open incidents after this step. Call it before the next step or not at all."""
    trace: list[TraceEntry] = field(default_factory=list)
    """Lines of the live controller's decision log, for a run that fp8watch recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One run. Iterating `samples` may raise `BadInput` at a bad row; samples before it are valid."""

    run: str
    source: str
    """Which reader made it: csv, trainer_state, megatron, torchtitan, nemo, wandb, tensorboard, fp8watch, bundle."""
    samples: Iterator[Sample]
    may_be_filtered: bool = True
    """The values come from a log, not from the tensors (a trainer may log the mean instead of a NaN)."""
    facts: Facts = field(default_factory=Facts)
    notes: list[str] = field(default_factory=list)
    """Remarks for the user on how it was read (`file:line: field: remark`); the reader adds them during iteration."""
    steps: Callable[[], Iterator[Seen]] | None = None
    """For runs that fp8watch recorded: the same steps, run by the live controller's own code."""
    place: str = ""
    """The file it was read from, or the URL without its secrets."""


class Attempts:
    """Numbers the attempts of a log: a step that does not grow means that the run went back and continued."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._attempt = 0
        self._grew = 0
        self._fell = 0
        self._stood = 0
        self._fault = ""

    def repeat(self, step: int, where: str) -> None:
        """Note a row that repeats a value of the same step."""
        self._stood += 1
        if not self._fault:
            self._fault = f"{where}: step: {step} again"

    def check(self) -> None:
        """At the end of a log: raise `BadInput`, naming the first bad row, if its steps mostly do not grow.

        Logs of real runs have restarts and rollbacks, where the step falls now and then.
        """
        if self._grew + self._fell + self._stood < LEAST_ROWS:
            return  # too few rows to judge
        if self._fell > self._grew or (not self._grew and not self._fell):
            counts = f"{self._grew} times it grows, {self._fell} it falls, {self._stood} it stays"
            raise BadInput([f"{self._fault}; steps mostly do not grow in this log ({counts}): nothing can be found"])

    def sample(self, step: int, scalars: dict[str, float], where: str = "") -> Sample:
        """The sample of the next logged step; `where` is its `file:line`."""
        if self._last is not None:
            self._grew += step > self._last
            self._fell += step < self._last
            if step < self._last and not self._fault:
                self._fault = f"{where}: step: {step} after {self._last}"
            self._attempt += step <= self._last
        self._last = step
        return Sample(attempt=self._attempt, step=step, scalars=scalars)
