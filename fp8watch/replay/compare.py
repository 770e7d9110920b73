"""Compares policies on the same recorded runs: the findings are the same by construction, the answers differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8watch.policy.schema import Policy
from fp8watch.replay.detected import detected
from fp8watch.replay.namesakes import told_apart
from fp8watch.replay.recording import Recording
from fp8watch.replay.run import Assumptions, each

SUMS = ("actions", "rollbacks", "steps_replayed", "proposed", "asked", "unavailable", "refused", "undone")
"""Costs that are summed over runs."""


@dataclass(slots=True, kw_only=True)
class Compared:
    """One run under every policy."""

    run: str
    """Its name, with as much of its path as distinguishes it from other runs of that name."""
    steps: int = 0
    findings: Counter[str] = field(default_factory=Counter)
    """Severity -> number of findings; the same for all policies."""
    costs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Policy -> `Rehearsal.cost`."""
    answers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Policy -> the lines that replay would print."""
    apart_at: int | None = None
    """First step at which the policies answered differently; None: none."""


def compare(
    policies: dict[str, Policy], paths: Sequence[Path | str], assumptions: Assumptions, notes: list[str] | None = None
) -> tuple[list[Compared], list[str]]:
    """Every run at these paths under every policy, in one pass per run; and the problems of the input. Remarks on how a
    run was read are added to `notes`. Raises `Unreachable` if a Redis does not answer."""
    found: list[Compared] = []
    places: list[tuple[str, str]] = []

    def one(recording: Recording) -> None:
        compared = Compared(run=recording.run, answers={name: [] for name in policies})
        found.append(compared)
        places.append((recording.run, recording.place))
        rehearsals = {name: assumptions.rehearsal(recording, policy) for name, policy in policies.items()}
        try:
            for seen in detected(recording):
                compared.steps += 1
                compared.findings.update(finding.severity for finding in seen.findings)
                saved = list(recording.facts.saved)
                for name, rehearsal in rehearsals.items():
                    recording.facts.saved = list(saved)  # each rehearsal empties it
                    compared.answers[name] += rehearsal.observe(seen)
                recording.facts.saved = []
        finally:  # a bad row ends the run; steps before it count
            compared.costs = {name: rehearsal.cost() for name, rehearsal in rehearsals.items()}
            compared.apart_at = _apart_at(compared.answers)
            if notes is not None:
                notes.extend(recording.notes)

    problems = each(paths, one)
    for compared, name in zip(found, told_apart(places), strict=True):
        compared.run = name
    return found, problems


def totals(runs: Sequence[Compared], name: str) -> dict[str, int]:
    """Sums of one policy's costs over all runs."""
    return {key: sum(int(run.costs[name][key]) for run in runs if name in run.costs) for key in SUMS}


def as_json(runs: Sequence[Compared], policies: Sequence[str]) -> dict[str, Any]:
    """The whole comparison as one document."""
    return {
        "policies": list(policies),
        "runs": [
            {
                "run": run.run, "steps": run.steps, "findings": dict(run.findings), "costs": run.costs,
                "answers": run.answers, "apart_at": run.apart_at,
            }
            for run in runs
        ],
        "totals": {name: totals(runs, name) for name in policies},
    }  # fmt: skip


def rows(runs: Sequence[Compared], policies: Sequence[str]) -> list[tuple[object, ...]]:
    """One row per run and policy, and a total per policy."""
    made: list[tuple[object, ...]] = []
    for run in runs:
        found = f"{run.findings['act']} act, {run.findings['warn']} warn"
        for number, name in enumerate(policies):
            cost = run.costs.get(name)
            if cost is None:
                continue
            first = number == 0
            made.append((run.run, found if first else "", name, *_cells(cost), run.apart_at if first else ""))
    for name in policies:
        made.append(("all runs", "", name, *_cells(totals(runs, name) | {"applied": None, "halted_step": None}), ""))
    return made


def _cells(cost: dict[str, Any]) -> tuple[object, ...]:
    applied = cost["applied"]
    what = str(cost["actions"]) if applied is None else ", ".join(f"{n} {a}" for a, n in applied.items()) or "nothing"
    if cost.get("halted_step") is not None:
        what += f" (halted at {cost['halted_step']})"
    return what, cost["steps_replayed"], cost["asked"], cost["proposed"], cost["unavailable"] + cost["refused"]


def _apart_at(answers: dict[str, list[dict[str, Any]]]) -> int | None:
    """The first step whose lines differ between any two policies, apart from rule names and reasons."""
    logs = [[(row["step"], row["kind"], row["action"], row["params"]) for row in lines] for lines in answers.values()]
    longest = max((len(log) for log in logs), default=0)
    for index in range(longest):
        here = [log[index] if index < len(log) else None for log in logs]
        if any(item != here[0] for item in here):
            return min(int(item[0]) for item in here if item is not None)
    return None
