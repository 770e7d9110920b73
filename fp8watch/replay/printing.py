"""Prints the results of a replay: as JSON lines, each as soon as it is known, or as tables for people at the end.

Two logs may use the same run name. A JSON line has the run's name and, as `path`, where it was read from; a table gives
such runs unique names, which is possible only at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TextIO, cast

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fp8watch import evidence_words
from fp8watch.errors import OutputFailed
from fp8watch.records import Finding, TraceEntry
from fp8watch.replay.namesakes import told_apart
from fp8watch.replay.recording import Recording

Format = Literal["jsonl", "table"]
_Rows = list[tuple[int, tuple[str, ...]]]
"""Index of the run, and the cells after its name."""
_COLUMNS = ("step", "onset_step", "detector", "severity", "cause")
"""Columns of a table between the run, which comes first, and the explanation, which comes last."""
_NAME_WIDTH = 24
"""Longest run name, in characters, that a table does not wrap."""
_KINDS = {"unavailable": "passes over", "refused": "may not do", "propose": "proposes", "wait": "asks for",
          "apply": "does", "undo": "undoes", "expired": "no longer asks for"}  # fmt: skip
"""Kind of an action's line -> verb in a table."""
_WIDTH = 140
"""Width of a table that is not written to a terminal."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """How much was read, and how much was found."""

    runs: int = 0
    steps: int = 0
    findings: Counter[str] = field(default_factory=Counter)
    """Severity -> number of findings."""
    is_whole: bool = True
    """False: some input could not be read, or not to its end."""

    def text(self) -> str:
        """The tally in one line. It says "no findings" only of what was read."""
        if not self.steps:
            return "nothing was read" + ("" if self.is_whole else ": see the errors")
        found = ", ".join(f"{self.findings[name]} {name}" for name in ("act", "warn") if self.findings[name])
        steps = "1 step" if self.steps == 1 else f"{self.steps:,} steps"
        of_runs = "1 run" if self.runs == 1 else f"{self.runs} runs"
        if self.is_whole:
            return f"{steps} of {of_runs}: {found or 'no findings'}"
        return f"{steps} of {of_runs} could be read: {found or 'nothing found'} in them; for the rest see the errors"


class Printer(Protocol):
    """Prints results, in one format."""

    def begin(self, recording: Recording) -> None:
        """Start a run: all that follows belongs to it."""

    def finding(self, row: dict[str, Any]) -> None:
        """Print a finding."""

    def action(self, row: dict[str, Any]) -> None:
        """Print an action that the policy would have taken, or took."""

    def summary(self, row: dict[str, Any]) -> None:
        """Print the costs of a policy in a run."""

    def decision(self, entry: TraceEntry) -> None:
        """Print a line of the decision log."""

    def close(self, tally: Tally) -> None:
        """Finish the output."""


def printer(out_format: Format, out: TextIO) -> Printer:
    """The printer for a format. Its methods raise `OutputFailed` if the output cannot be written."""
    checked = cast(TextIO, _Checked(out))
    return Lines(checked) if out_format == "jsonl" else Tables(checked)


class _Checked:
    """A stream that raises `OutputFailed`, to distinguish its failures from those of input files."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, text: str) -> int:
        try:
            return self._out.write(text)
        except OSError as error:
            raise OutputFailed(error) from error

    def flush(self) -> None:
        try:
            self._out.flush()
        except OSError as error:
            raise OutputFailed(error) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)


def as_json(finding: Finding, recording: Recording) -> dict[str, Any]:
    """The finding as replay prints it: the keys of the contract, and the incident that it belongs to."""
    evidence = dict(finding.evidence)
    if recording.may_be_filtered:
        evidence["series"] = "may be filtered"
    return {
        "run": finding.run,
        "step": finding.step,
        "onset_step": finding.onset_step,
        "detector": finding.detector,
        "severity": finding.severity,
        "cause": finding.cause,
        "tensor": finding.tensor,
        "layer": finding.layer,
        "rank": finding.rank,
        "evidence": evidence,
        "incident": finding.incident,
    }


class Lines:
    """JSON lines: one object per line, each written as soon as it is known."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._path = ""

    def begin(self, recording: Recording) -> None:
        """See `Printer`."""
        self._path = recording.place

    def finding(self, row: dict[str, Any]) -> None:
        """A finding."""
        self._out.write(msgspec.json.encode(row | {"path": self._path}).decode() + "\n")

    def action(self, row: dict[str, Any]) -> None:
        """An action."""
        self.finding(row)

    def summary(self, row: dict[str, Any]) -> None:
        """A summary."""
        self.finding(row)

    def decision(self, entry: TraceEntry) -> None:
        """A line of the decision log."""
        self._out.write(msgspec.json.encode(entry).decode() + "\n")

    def close(self, tally: Tally) -> None:
        """The end."""
        self._out.flush()


class Tables:
    """Tables for people, printed at the end."""

    def __init__(self, out: TextIO) -> None:
        self._console = Console(file=out, width=None if out.isatty() else _WIDTH)
        self._runs: list[tuple[str, str]] = []
        """Name and place of each run, in order."""
        self._table: _Rows = []
        self._log: _Rows = []
        self._costs: _Rows = []

    def begin(self, recording: Recording) -> None:
        """See `Printer`."""
        self._runs.append((recording.run, recording.place))

    def finding(self, row: dict[str, Any]) -> None:
        """A finding."""
        evidence = row["evidence"]
        lead = evidence_words.not_finite(evidence)
        more = "; ".join(evidence.get("for", [])) or _brief(evidence)
        reasons = "; ".join(part for part in (lead, more) if part)
        where = [row["tensor"], None if row["rank"] is None else f"rank {row['rank']}", reasons]
        self._add(self._table, *(str(row[c]) for c in _COLUMNS), ": ".join(part for part in where if part))

    def action(self, row: dict[str, Any]) -> None:
        """An action."""
        params = "" if row["kind"] == "undo" else _params(row["params"])
        words = f"{_KINDS.get(row['kind'], row['kind'])} {row['action']}{params}, rule {row['rule']}"
        words += f": {row['reason']}" if row["reason"] else ""
        self._add(self._table, str(row["step"]), "", row["severity"], "", "", words)

    def summary(self, row: dict[str, Any]) -> None:
        """A summary."""
        cost = row["summary"]
        tokens = cost["tokens_replayed"]
        replayed = f"{cost['steps_replayed']} steps" + ("" if not tokens else f", {tokens:.4g} tokens")
        in_the_way = ", ".join(f"{cost[key]} {key}" for key in ("unavailable", "refused", "expired") if cost[key])
        halted = "" if cost["halted_step"] is None else f"halted at step {cost['halted_step']}"
        done = ", ".join(f"{count} {name}" for name, count in cost["applied"].items()) or "nothing"
        proposed = f"{cost['proposed']} proposed" if cost["proposed"] else ""
        self._add(
            self._costs, "; ".join(filter(None, [done, proposed, halted])), replayed, str(cost["asked"]),
            in_the_way, f"{cost['assumed']}; checkpoints {cost['checkpoints']}",
        )  # fmt: skip

    def decision(self, entry: TraceEntry) -> None:
        """A line of the decision log."""
        self._add(
            self._log, f"{entry.attempt}/{entry.step}", entry.event, entry.incident, entry.action, entry.rule,
            entry.reason,
        )  # fmt: skip

    def close(self, tally: Tally) -> None:
        """Print the tables and the tally."""
        names = told_apart(self._runs)
        for table in self._tables(names):
            self._console.print(table)
        self._console.print(Text(tally.text()))
        self._console.file.flush()

    def _tables(self, names: Sequence[str]) -> Iterator[Table]:
        if self._table:
            found = Table()
            # A long name, with a path in it, must not leave too little room for the explanation.
            is_whole = max(map(len, names)) <= _NAME_WIDTH
            found.add_column("run", no_wrap=is_whole, overflow="fold")
            for column in _COLUMNS:
                found.add_column(column.removesuffix("_step"), no_wrap=True)
            found.add_column("where and why", overflow="fold")
            yield _filled(found, self._table, names)
        if self._log:
            decisions = _titled("Decisions", ["step", "event", "incident", "action", "rule", "why"], len(names) > 1)
            yield _filled(decisions, self._log, names if len(names) > 1 else None)
        if self._costs:
            columns = ["done", "replayed", "asked", "in the way", "assumed"]
            yield _filled(_titled("What the policy would have done", columns, True), self._costs, names)

    def _add(self, rows: _Rows, *cells: str) -> None:
        """Add a row for the current run."""
        rows.append((len(self._runs) - 1, cells))


def _titled(title: str, columns: Sequence[str], has_run: bool) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ["run", *columns] if has_run else columns:
        table.add_column(column, overflow="fold")
    return table


def _filled(table: Table, rows: _Rows, names: Sequence[str] | None) -> Table:
    for run, cells in rows:
        # Text, not markup: names from a run may contain brackets.
        table.add_row(*(Text(cell) for cell in (cells if names is None else (names[run], *cells))))
    return table


def _params(params: dict[str, Any]) -> str:
    """Parameters in a few words; of a list only its length, unless it has one item."""
    parts = [
        f"{len(value)} {key}" if isinstance(value, list | dict) and len(value) != 1
        else f"{key} {next(iter(value)) if isinstance(value, list | dict) else value}"
        for key, value in params.items()
    ]  # fmt: skip
    return f" ({', '.join(parts)})" if parts else ""


def _brief(evidence: dict[str, Any]) -> str:
    told = evidence_words.telling(evidence)
    if evidence_words.not_finite(evidence):
        told.pop(evidence_words.FIRST_STEP, None)  # it is said there
    plain = {key: value for key, value in told.items() if isinstance(value, (int, float, str))}
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in plain.items()
    )
