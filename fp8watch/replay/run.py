"""Takes recorded runs through the live detectors, step by step, without looking ahead; optionally with a policy.

The output for a prefix of a run is a prefix of the output for the run: a line is written in the step in which it
becomes known, and never withdrawn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from fp8watch.errors import EXIT_BAD_INPUT, EXIT_UNREACHABLE, BadInput, MissingDependency, Unreachable
from fp8watch.policy.schema import Policy
from fp8watch.replay.detected import detected
from fp8watch.replay.lines import shown
from fp8watch.replay.printing import Format, Printer, Tally, as_json, printer
from fp8watch.replay.readers import open_path
from fp8watch.replay.readers.cluster import is_url, without_secrets
from fp8watch.replay.recorded import Recorded, is_under
from fp8watch.replay.recording import FILTERED_NOTE, NOTE, Recording
from fp8watch.replay.rehearsal import Assume, Rehearsal

MAX_NAMES = 16
"""Most runs that are named if the requested one is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What a rehearsal needs to know and a recording does not tell."""

    outcome: Assume = "helped"
    """Whether remedies help."""
    checkpoint_every: int = 0
    """Steps between checkpoints, for a log that does not record them; 0: there were none."""
    warmup_steps: int | None = None

    def rehearsal(self, recording: Recording, policy: Policy) -> Rehearsal:
        """A rehearsal of a policy under these assumptions."""
        return Rehearsal(
            recording.run, policy, facts=recording.facts, assume=self.outcome,
            checkpoint_every=self.checkpoint_every, warmup_steps=self.warmup_steps,
        )  # fmt: skip


def replay(
    paths: Sequence[Path | str],
    policy: Policy | None = None,
    out_format: Format = "jsonl",
    *,
    out: TextIO | None = None,
    err: TextIO | None = None,
    assumptions: Assumptions | None = None,
    decisions: bool = False,
    run: str | None = None,
) -> int:
    """Replay every run at these paths; the exit code: 0; 2 when some input was bad, 3 when a Redis did not answer (all
    of it is named on `err`).

    What was found before a bad row is printed, and the other paths are still read. With `decisions` the decision log
    is printed instead, of runs that fp8watch recorded. `run`: of what holds several, this one only.
    """
    out, err = out or sys.stdout, err or sys.stderr
    lines, tally = printer(out_format, out), Tally()

    def one(recording: Recording) -> None:
        tally.runs += 1
        lines.begin(recording)
        before = tally.steps
        try:
            if decisions:
                _decisions_of(recording, lines, tally)
            else:
                _replay_one(recording, policy, lines, err, assumptions or Assumptions(), tally)
            if tally.steps == before:
                err.write(f"{NOTE}{_where(recording)}: there are no steps in it\n")
        finally:
            for note in recording.notes:
                err.write(f"{NOTE}{note}\n")

    code = EXIT_BAD_INPUT
    try:
        problems = each(paths, one, run)
    except Unreachable as error:
        code, problems = EXIT_UNREACHABLE, error.problems
    tally.is_whole = not problems
    lines.close(tally)
    for problem in problems:
        err.write(problem + "\n")
    return code if problems else 0


def each(paths: Sequence[Path | str], one: Callable[[Recording], None], run: str | None = None) -> list[str]:
    """Do something with every run at these paths, or with those of one name; what was wrong with the input.

    Raises `Unreachable`, with all of that, when a Redis did not answer."""
    problems: list[str] = []
    does_answer = True
    for path in paths:
        name = without_secrets(str(path)) if isinstance(path, str) and is_url(path) else str(path)
        try:
            recordings = open_path(path)
        except BadInput as error:
            problems += error.problems
            does_answer &= not isinstance(error, Unreachable)
            continue
        except (MissingDependency, OSError) as error:
            problems.append(f"{name}:1: path: {error}")
            continue
        names = list(dict.fromkeys(recording.run for recording in recordings))
        if run is not None and run not in names:
            problems.append(f"{name}:1: run: no run {run!r}; there are: {', '.join(map(shown, names[:MAX_NAMES]))}")
        for recording in recordings:
            if run is not None and recording.run != run:
                continue
            try:
                one(recording)
            except BadInput as error:
                problems += error.problems
                does_answer &= not isinstance(error, Unreachable)
            except OSError as error:
                problems.append(f"{name}:1: path: {error}")
    if not does_answer:
        raise Unreachable(problems)
    return problems


def _where(recording: Recording) -> str:
    """A run as a note names it: other files may have one of that name."""
    return shown(recording.run) + (f" ({recording.place})" if recording.place else "")


def _replay_one(
    recording: Recording, policy: Policy | None, lines: Printer, err: TextIO, assumptions: Assumptions, tally: Tally
) -> None:
    if recording.may_be_filtered:
        err.write(f"{NOTE}{_where(recording)}: {FILTERED_NOTE}\n")
    follower: Rehearsal | Recorded | None = None
    if policy is not None:
        # Nothing needs to be assumed for the run's own policy: what it did is recorded.
        follower = Recorded(recording.run) if is_under(recording, policy) else assumptions.rehearsal(recording, policy)
    for seen in detected(recording):
        tally.steps += 1
        for finding in seen.findings:
            tally.findings[finding.severity] += 1
            lines.finding(as_json(finding, recording))
        if follower is not None:
            for row in follower.observe(seen):
                lines.action(row)
    if follower is not None:
        lines.summary({"run": recording.run, "summary": follower.cost()})


def _decisions_of(recording: Recording, lines: Printer, tally: Tally) -> None:
    if recording.steps is None:
        reason = "no run of fp8watch's own, or one recorded without a journal: there is no decision log to replay"
        raise BadInput([f"{recording.place or recording.run}:1: decisions: {reason}"])
    for seen in recording.steps():
        tally.steps += 1
        tally.findings.update(finding.severity for finding in seen.findings)
        for entry in seen.trace:
            lines.decision(entry)
