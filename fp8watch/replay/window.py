"""The steps of a run that a bundle holds, and what besides frames a replay of them needs.

A policy decides by more than the detectors' findings: by the checkpoints that are there, and by what the run can do. A
window keeps the checkpoints that were there when it begins, and for every step those saved and the lines of the
decision log, in the order in which the run's own replay has them.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

import msgspec

from fp8watch.controller.checkpoints import Ledger
from fp8watch.controller.stores.base import Store
from fp8watch.detect.base import Sample
from fp8watch.detect.pipeline import Pipeline
from fp8watch.errors import BadInput
from fp8watch.policy.load import parse
from fp8watch.policy.schema import Policy
from fp8watch.records import CheckpointRecord, StepFrame, TraceEntry
from fp8watch.replay.incident import Incident
from fp8watch.replay.reenact import Reenactment, has_journal
from fp8watch.replay.rehearsal import KEPT_CHECKPOINTS

MARGIN_STEPS = 256
"""Steps before the onset and after the last line of the log whose frames go into a bundle; the store keeps as many."""


class Row(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A sample of the window; rows are in the order in which the detectors saw them."""

    attempt: int
    step: int
    is_quiet: bool = False
    generation: int = 0
    """Counts the sets of detectors: each new process began with new ones."""
    expected_ranks: int = 0
    saved: list[CheckpointRecord] = []
    """Checkpoints that became known since the row before."""
    trace: list[TraceEntry] = []
    """Lines of the decision log since the row before, of all incidents."""


class Window(msgspec.Struct, kw_only=True):
    """What a replay of the bundle needs besides the frames."""

    rows: list[Row] = []
    prefixes: dict[int, str] = {}
    """Generation -> prefix of the ids of its findings."""
    known: list[CheckpointRecord] = []
    """Checkpoints of before the first row; those without a known trouble are candidates, to be judged by the policy."""
    unavailable: dict[str, str] = {}
    """Action -> why the run could not do it."""
    warmup_steps: int | None = None


def of_incident(store: Store, incident: Incident, prefixes_of: re.Pattern[str]) -> tuple[Window, bytes | None]:
    """The window of an incident, and the state of the detectors before its first row (None: not known).

    `prefixes_of`: form of the ids of the detectors' own findings.
    """
    run = incident.record.run
    if not has_journal(store, run):
        return Window(rows=_rows_of_frames(store, incident)), None
    window = Window()
    state: list[bytes] = []
    pipelines: list[Pipeline] = []
    covered: deque[Row | None] = deque()
    """A sample's row, or None outside the window; in the order in which the re-enactment yields them."""

    def before(sample: Sample, pipeline: Pipeline) -> None:
        if not pipelines or pipelines[-1] is not pipeline:
            pipelines.append(pipeline)
        if not incident.covers(sample.attempt, sample.step, MARGIN_STEPS):
            covered.append(None)
            return
        if not state:
            state.append(pipeline.dump())
        covered.append(
            Row(
                attempt=sample.attempt, step=sample.step, is_quiet=sample.is_quiet, generation=len(pipelines),
                expected_ranks=sample.expected_ranks,
            )
        )  # fmt: skip

    again = Reenactment(store, run, before=before)
    facts, ledger = again.facts, Ledger(_healthy_steps(incident.record.hello.policy))
    saved: list[CheckpointRecord] = []
    for seen in again.steps():
        for finding in seen.findings:
            if prefixes_of.fullmatch(finding.id):
                window.prefixes.setdefault(len(pipelines), finding.id.rpartition("f")[0])
        saved, facts.saved = [*saved, *facts.saved], []
        is_new = bool(covered)  # else: lines after the last step, which come with its sample again
        row = covered.popleft() if covered else None
        if not is_new and window.rows and _key(window.rows[-1]) == (seen.sample.attempt, seen.sample.step):
            last = window.rows[-1]
            window.rows[-1] = msgspec.structs.replace(last, trace=[*last.trace, *seen.trace])
        if row is not None:
            if not window.rows:
                window.known = _undecided(ledger)
                window.unavailable, window.warmup_steps = dict(facts.unavailable), facts.warmup_steps
            window.rows.append(msgspec.structs.replace(row, saved=saved, trace=seen.trace))
            saved = []
        elif not window.rows:
            for record in saved:
                ledger.add(record)
            ledger.passed(seen.sample.step, seen.troubles())
            saved = []
    return window, state[0] if state else None


def with_log(window: Window, trace: Iterable[TraceEntry]) -> Window:
    """A window of an earlier version, which had no lines, with those of the incident's own log."""
    if not window.rows or any(row.trace for row in window.rows):
        return window
    lines: dict[int, list[TraceEntry]] = {}
    for entry in trace:
        at = (entry.attempt, entry.step)
        index = next((n for n, row in enumerate(window.rows) if _key(row) >= at), len(window.rows) - 1)
        lines.setdefault(index, []).append(entry)
    rows = [msgspec.structs.replace(row, trace=lines.get(n, [])) for n, row in enumerate(window.rows)]
    return msgspec.structs.replace(window, rows=rows)


def _key(row: Row) -> tuple[int, int]:
    return row.attempt, row.step


def _rows_of_frames(store: Store, incident: Incident) -> list[Row]:
    """The rows of a run without a journal."""
    first, last = incident.first_step - MARGIN_STEPS, incident.last_step + MARGIN_STEPS
    frames = store.read(incident.record.run, StepFrame, first, last)
    keys = {(item.attempt, item.step) for item in frames if incident.covers(item.attempt, item.step, MARGIN_STEPS)}
    return [Row(attempt=attempt, step=step) for attempt, step in sorted(keys)]


def _healthy_steps(policy: str | None) -> int:
    known = Policy(version=1)
    with suppress(BadInput):  # of another version
        known = parse(policy) if policy else known
    return known.healthy_steps


def _undecided(ledger: Ledger) -> list[CheckpointRecord]:
    """Checkpoints as a policy with other `healthy_steps` may take them: whether one is good is for it to say."""
    return [
        msgspec.structs.replace(record, label="candidate", reason="") if record.label == "good" else record
        for record in ledger.records()[-KEPT_CHECKPOINTS:]
    ]
