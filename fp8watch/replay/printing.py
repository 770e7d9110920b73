"""How replay prints what it finds: JSON lines, each as soon as it is known, or tables for people at the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TextIO, cast

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fp8watch.errors import OutputFailed
from fp8watch.records import Finding, TraceEntry
from fp8watch.replay.recording import Recording

Format = Literal["jsonl", "table"]
_COLUMNS = ("run", "step", "onset_step", "detector", "severity", "cause")
"""Of a table; what and why come last."""
_KINDS = {"unavailable": "passes over", "refused": "may not do", "propose": "proposes", "wait": "asks for",
          "apply": "does", "undo": "undoes", "expired": "no longer asks for"}  # fmt: skip
"""Of an action's line -> the verb that a table has."""
_WIDTH = 140
"""Of a table that is not written to a terminal."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """How much was looked at, and what came of it."""

    runs: int = 0
    steps: int = 0
    findings: Counter[str] = field(default_factory=Counter)
    """Severity -> lines."""
    is_whole: bool = True
    """False: something could not be read, or not to its end."""

    def text(self) -> str:
        """In one line. That nothing was found is said only of what was read."""
        if not self.steps:
            return "nothing was read" + ("" if self.is_whole else ": see the errors")
        found = ", ".join(f"{self.findings[name]} {name}" for name in ("act", "warn") if self.findings[name])
        steps = "1 step" if self.steps == 1 else f"{self.steps:,} steps"
        of_runs = "1 run" if self.runs == 1 else f"{self.runs} runs"
        if self.is_whole:
            return f"{steps} of {of_runs}: {found or 'no findings'}"
        return f"{steps} of {of_runs} could be read: {found or 'nothing found'} in them; of the rest see the errors"


class Printer(Protocol):
    """Where the lines go."""

    def finding(self, row: dict[str, Any]) -> None:
        """A finding."""

    def action(self, row: dict[str, Any]) -> None:
        """Something that the policy would have done, or did."""

    def summary(self, row: dict[str, Any]) -> None:
        """What a policy came to in a run."""

    def decision(self, entry: TraceEntry) -> None:
        """A line of the decision log."""

    def close(self, tally: Tally) -> None:
        """The end."""


def printer(out_format: Format, out: TextIO) -> Printer:
    """The printer of a format. Its methods raise `OutputFailed`, which is no fault of the input."""
    checked = cast(TextIO, _Checked(out))
    return Lines(checked) if out_format == "jsonl" else Tables(checked)


class _Checked:
    """A stream whose failures are told from those of the files that are read."""

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
    """The finding as replay prints it: the keys of the contract, and the incident that ties its lines together."""
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
    """JSON, one object a line, each written as soon as it is known."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def finding(self, row: dict[str, Any]) -> None:
        """A finding."""
        self._out.write(msgspec.json.encode(row).decode() + "\n")

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
    """For people, at the end."""

    def __init__(self, out: TextIO) -> None:
        self._console = Console(file=out, width=None if out.isatty() else _WIDTH)
        self._table = Table()
        self._costs = Table(title="What the policy would have done", title_justify="left")
        self._log = Table(title="Decisions", title_justify="left")
        for column in _COLUMNS:
            self._table.add_column(column.removesuffix("_step"), no_wrap=True)
        self._table.add_column("where and why", overflow="fold")
        for column in ("run", "done", "replayed", "asked", "in the way", "assumed"):
            self._costs.add_column(column, overflow="fold")
        for column in ("step", "event", "incident", "action", "rule", "why"):
            self._log.add_column(column, overflow="fold")

    def finding(self, row: dict[str, Any]) -> None:
        """A finding."""
        reasons = "; ".join(row["evidence"].get("for", [])) or _brief(row["evidence"])
        where = [row["tensor"], None if row["rank"] is None else f"rank {row['rank']}", reasons]
        self._add(self._table, *(str(row[c]) for c in _COLUMNS), ": ".join(part for part in where if part))

    def action(self, row: dict[str, Any]) -> None:
        """An action."""
        params = "" if row["kind"] == "undo" else _params(row["params"])
        words = f"{_KINDS.get(row['kind'], row['kind'])} {row['action']}{params}, rule {row['rule']}"
        words += f": {row['reason']}" if row["reason"] else ""
        self._add(self._table, str(row["run"]), str(row["step"]), "", row["severity"], "", "", words)

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
            self._costs, row["run"], "; ".join(filter(None, [done, proposed, halted])), replayed, str(cost["asked"]),
            in_the_way, f"{cost['assumed']}; checkpoints {cost['checkpoints']}",
        )  # fmt: skip

    def decision(self, entry: TraceEntry) -> None:
        """A line of the decision log."""
        self._add(
            self._log, f"{entry.attempt}/{entry.step}", entry.event, entry.incident, entry.action, entry.rule,
            entry.reason,
        )  # fmt: skip

    def close(self, tally: Tally) -> None:
        """Print what there is, and how much was looked at."""
        tables = [table for table in (self._table, self._log, self._costs) if table.row_count]
        for table in tables:
            self._console.print(table)
        self._console.print(Text(tally.text()))
        self._console.file.flush()

    def _add(self, table: Table, *cells: str) -> None:
        # Text and not markup: names from a run may hold brackets.
        table.add_row(*(Text(cell) for cell in cells))


def _params(params: dict[str, Any]) -> str:
    """Parameters in a few words: of a list only how long it is, unless it has one item."""
    parts = [
        f"{len(value)} {key}" if isinstance(value, list | dict) and len(value) != 1
        else f"{key} {next(iter(value)) if isinstance(value, list | dict) else value}"
        for key, value in params.items()
    ]  # fmt: skip
    return f" ({', '.join(parts)})" if parts else ""


def _brief(evidence: dict[str, Any]) -> str:
    plain = {key: value for key, value in evidence.items() if isinstance(value, (int, float, str))}
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in plain.items()
    )
