"""Recorded runs through the live detectors, step by step, without looking ahead.

What is printed for a prefix of a run is a prefix of what is printed for the run: a line is written in the step in
which it becomes known and never taken back.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

import msgspec
from rich.console import Console
from rich.table import Table

from fp8watch.detect.pipeline import Pipeline
from fp8watch.errors import EXIT_BAD_INPUT, BadInput, MissingDependency
from fp8watch.policy.schema import Policy
from fp8watch.records import Finding
from fp8watch.replay.proposals import Proposals
from fp8watch.replay.readers import open_path
from fp8watch.replay.recording import FILTERED_NOTE, Recording

Format = Literal["jsonl", "table"]
_COLUMNS = ("run", "step", "onset_step", "detector", "severity", "cause")
"""Of a table; what and why come last."""
_WIDTH = 140
"""Of a table that is not written to a terminal."""


def replay(
    paths: Sequence[Path],
    policy: Policy | None = None,
    out_format: Format = "jsonl",
    *,
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> int:
    """Replay every run at these paths; the exit code: 0, or 2 when some input was bad (all of it is named on `err`).

    What was found before a bad row is printed, and the other paths are still read.
    """
    out, err = out or sys.stdout, err or sys.stderr
    printer: _Lines | _Rows = _Lines(out) if out_format == "jsonl" else _Rows(out)
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
                _replay_one(recording, policy, printer, err)
            except BadInput as error:
                problems += error.problems
            except OSError as error:
                problems.append(f"{path}:1: path: {error}")
    printer.close()
    for problem in problems:
        err.write(problem + "\n")
    return EXIT_BAD_INPUT if problems else 0


def _replay_one(recording: Recording, policy: Policy | None, printer: _Lines | _Rows, err: TextIO) -> None:
    pipeline = Pipeline(recording.run)
    proposals = Proposals(recording.run, policy) if policy is not None else None
    if recording.may_be_filtered:
        err.write(f"{recording.run}: {FILTERED_NOTE}\n")
    for sample in recording.samples:
        for finding in pipeline.observe(sample):
            printer.finding(as_json(finding, recording))
        for action in proposals.observe(sample, pipeline) if proposals is not None else ():
            printer.action(action)


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


class _Lines:
    """JSON, one object a line, each written as soon as it is known."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def finding(self, row: dict[str, Any]) -> None:
        self._out.write(msgspec.json.encode(row).decode() + "\n")

    def action(self, row: dict[str, Any]) -> None:
        self.finding(row)

    def close(self) -> None:
        self._out.flush()


class _Rows:
    """A table for people, at the end."""

    def __init__(self, out: TextIO) -> None:
        self._console = Console(file=out, width=None if out.isatty() else _WIDTH)
        self._table = Table()
        for column in _COLUMNS:
            self._table.add_column(column.removesuffix("_step"), no_wrap=True)
        self._table.add_column("where and why", overflow="fold")

    def finding(self, row: dict[str, Any]) -> None:
        reasons = "; ".join(row["evidence"].get("for", [])) or _brief(row["evidence"])
        where = [row["tensor"], None if row["rank"] is None else f"rank {row['rank']}", reasons]
        self._table.add_row(*(str(row[c]) for c in _COLUMNS), ": ".join(part for part in where if part))

    def action(self, row: dict[str, Any]) -> None:
        words = f"{row['action']} {row['params']} ({row['rule']}): {row['reason']}"
        self._table.add_row(str(row["run"]), str(row["step"]), "", "proposal", "", "", words)

    def close(self) -> None:
        if self._table.row_count:
            self._console.print(self._table)
        else:
            self._console.print("no findings")


def _brief(evidence: dict[str, Any]) -> str:
    plain = {key: value for key, value in evidence.items() if isinstance(value, (int, float, str))}
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in plain.items()
    )
