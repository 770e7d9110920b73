"""A recorded run, whatever wrote it: a name, its steps in order, and what else is known of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from fp8watch.detect.base import Sample
from fp8watch.errors import BadInput
from fp8watch.policy.view import Trouble
from fp8watch.records import CheckpointRecord, Finding, TraceEntry

LEAST_ROWS = 20
"""Rows of a log by which its order is judged."""
NOTE = "note: "
"""Begins what is said on standard error and is no error."""
FILTERED_NOTE = "log source: the trainer may have repaired or averaged non-finite values before logging them"


@dataclass(slots=True, kw_only=True)
class Facts:
    """What a recording says beside its steps; its reader keeps it up to date while they are iterated."""

    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Action -> why the run could not do it. A log says nothing, and nothing is ruled out then."""
    warmup_steps: int | None = None
    saved: list[CheckpointRecord] = field(default_factory=list)
    """Checkpoints that were saved since somebody took them out of here."""
    policy: str | None = None
    """Text of the policy that the run was under; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One step as the detectors saw it."""

    sample: Sample
    findings: list[Finding]
    troubles: Callable[[], tuple[Trouble, ...]]
    """The open incidents after this step, asked for at once or never."""
    trace: list[TraceEntry] = field(default_factory=list)
    """What the live controller wrote into its decision log, of a run of our own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One run. Iterating `samples` may raise `BadInput` at the row that is wrong; what came before it counts."""

    run: str
    source: str
    """Which reader made it: csv, trainer_state, megatron, torchtitan, nemo, wandb, tensorboard, fp8watch, bundle."""
    samples: Iterator[Sample]
    may_be_filtered: bool = True
    """The values come from a log, not from the tensors (a trainer may log the mean instead of a NaN)."""
    facts: Facts = field(default_factory=Facts)
    notes: list[str] = field(default_factory=list)
    """What a person should know of how it was read (`file:line: field: remark`); its reader adds to it on the way."""
    steps: Callable[[], Iterator[Seen]] | None = None
    """Of runs that fp8watch recorded: the same steps through the live controller's own code."""
    place: str = ""
    """The file it was read from, or the URL without its secrets."""


class Attempts:
    """Numbers the attempts of a log: a step that does not grow means that the run went back and on again."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._attempt = 0
        self._grew = 0
        self._fell = 0
        self._stood = 0
        self._fault = ""

    def repeat(self, step: int, where: str) -> None:
        """A row says again what one of the same step right before it said."""
        self._stood += 1
        if not self._fault:
            self._fault = f"{where}: step: {step} again"

    def check(self) -> None:
        """At the end of a log: raises `BadInput` at the first wrong row when its steps mostly do not grow.

        Restarts and rollbacks, where a step falls now and then, are what logs of real runs have.
        """
        if self._grew + self._fell + self._stood < LEAST_ROWS:
            return  # the beginning of a log, too little to say what it is like
        if self._fell > self._grew or (not self._grew and not self._fell):
            counts = f"{self._grew} times it grows, {self._fell} it falls, {self._stood} it stays"
            raise BadInput([f"{self._fault}; steps mostly do not grow in this log ({counts}): nothing can be found"])

    def sample(self, step: int, scalars: dict[str, float], where: str = "") -> Sample:
        """The next logged step; `where` is its `file:line`."""
        if self._last is not None:
            self._grew += step > self._last
            self._fell += step < self._last
            if step < self._last and not self._fault:
                self._fault = f"{where}: step: {step} after {self._last}"
            self._attempt += step <= self._last
        self._last = step
        return Sample(attempt=self._attempt, step=step, scalars=scalars)
