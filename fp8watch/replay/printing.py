"""How replay prints what it finds: JSON lines, each as soon as it is known, or tables for people at the end."""

from __future__ import annotations

from typing import Any, Literal, Protocol, TextIO

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fp8watch.records import Finding, TraceEntry
from fp8watch.replay.recording import Recording

Format = Literal["jsonl", "table"]
_COLUMNS = ("run", "step", "onset_step", "detector", "severity", "cause")
"""Of a table; what and why come last."""
_WIDTH = 140
"""Of a table that is not written to a terminal."""


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

    def close(self) -> None:
        """The end."""


def printer(out_format: Format, out: TextIO) -> Printer:
    """The printer of a format."""
    return Lines(out) if out_format == "jsonl" else Tables(out)


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

    def close(self) -> None:
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
        params = {} if row["kind"] == "undo" else row["params"]
        words = f"{row['kind']} {row['action']} {params or ''} ({row['rule']}): {row['reason']}"
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

    def close(self) -> None:
        """Print what there is."""
        tables = [table for table in (self._table, self._log, self._costs) if table.row_count]
        for table in tables:
            self._console.print(table)
        if not self._table.row_count and not self._log.row_count:
            self._console.print("no findings")

    def _add(self, table: Table, *cells: str) -> None:
        # Text and not markup: names from a run may hold brackets.
        table.add_row(*(Text(cell) for cell in cells))


def _brief(evidence: dict[str, Any]) -> str:
    plain = {key: value for key, value in evidence.items() if isinstance(value, (int, float, str))}
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in plain.items()
    )
