"""Recorded runs through the live detectors, step by step, without looking ahead; and what a policy would have done.

What is printed for a prefix of a run is a prefix of what is printed for the run: a line is written in the step in
which it becomes known and never taken back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from fp8watch.errors import EXIT_BAD_INPUT, BadInput, MissingDependency
from fp8watch.policy.schema import Policy
from fp8watch.replay.detected import detected
from fp8watch.replay.printing import Format, Printer, as_json, printer
from fp8watch.replay.readers import open_path
from fp8watch.replay.recorded import Recorded, is_under
from fp8watch.replay.recording import FILTERED_NOTE, Recording
from fp8watch.replay.rehearsal import Assume, Rehearsal


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What a recording does not say and a rehearsal needs."""

    outcome: Assume = "helped"
    """Whether remedies help."""
    checkpoint_every: int = 0
    """Steps between checkpoints, of a log that does not speak of them; 0: there were none."""
    warmup_steps: int | None = None

    def rehearsal(self, recording: Recording, policy: Policy) -> Rehearsal:
        """A rehearsal of a policy under them."""
        return Rehearsal(
            recording.run, policy, facts=recording.facts, assume=self.outcome,
            checkpoint_every=self.checkpoint_every, warmup_steps=self.warmup_steps,
        )  # fmt: skip


def replay(
    paths: Sequence[Path],
    policy: Policy | None = None,
    out_format: Format = "jsonl",
    *,
    out: TextIO | None = None,
    err: TextIO | None = None,
    assumptions: Assumptions | None = None,
    decisions: bool = False,
) -> int:
    """Replay every run at these paths; the exit code: 0, or 2 when some input was bad (all of it is named on `err`).

    What was found before a bad row is printed, and the other paths are still read. With `decisions` the decision log
    is printed instead, of runs that fp8watch recorded.
    """
    out, err = out or sys.stdout, err or sys.stderr
    lines = printer(out_format, out)

    def one(recording: Recording) -> None:
        if decisions:
            _decisions_of(recording, lines)
        else:
            _replay_one(recording, policy, lines, err, assumptions or Assumptions())

    problems = each(paths, one)
    lines.close()
    for problem in problems:
        err.write(problem + "\n")
    return EXIT_BAD_INPUT if problems else 0


def each(paths: Sequence[Path], one: Callable[[Recording], None]) -> list[str]:
    """Do something with every run at these paths; what was wrong with the input."""
    problems: list[str] = []
    for path in paths:
        try:
            recordings = open_path(path)
        except BadInput as error:
            problems += error.problems
            continue
        except (MissingDependency, OSError) as error:
            problems.append(f"{path}:1: path: {error}")
            continue
        for recording in recordings:
            try:
                one(recording)
            except BadInput as error:
                problems += error.problems
            except OSError as error:
                problems.append(f"{path}:1: path: {error}")
    return problems


def _replay_one(
    recording: Recording, policy: Policy | None, lines: Printer, err: TextIO, assumptions: Assumptions
) -> None:
    if recording.may_be_filtered:
        err.write(f"{recording.run}: {FILTERED_NOTE}\n")
    follower: Rehearsal | Recorded | None = None
    if policy is not None:
        # Under its own policy nothing needs to be assumed: what it did is known.
        follower = Recorded(recording.run) if is_under(recording, policy) else assumptions.rehearsal(recording, policy)
    for seen in detected(recording):
        for finding in seen.findings:
            lines.finding(as_json(finding, recording))
        if follower is not None:
            for row in follower.observe(seen):
                lines.action(row)
    if follower is not None:
        lines.summary({"run": recording.run, "summary": follower.cost()})


def _decisions_of(recording: Recording, lines: Printer) -> None:
    if recording.steps is None:
        reason = "no run of fp8watch's own, or one recorded without a journal: there is no decision log to replay"
        raise BadInput([f"{recording.run}:1: decisions: {reason}"])
    for seen in recording.steps():
        for entry in seen.trace:
            lines.decision(entry)
