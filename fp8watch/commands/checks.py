"""One line of `fp8watch doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What was checked and the result. `absent`: missing or not observable, and not needed. `warning`: works, but may
    not be meant so; unlike a problem it does not change the exit code."""

    name: str
    result: Literal["ok", "absent", "warning", "problem"]
    detail: str


def problem(name: str, detail: str) -> Check:
    """A check that failed and needs attention."""
    return Check(name=name, result="problem", detail=detail)


def warning(name: str, detail: str) -> Check:
    """A check of what works, but may not be meant."""
    return Check(name=name, result="warning", detail=detail)


def without_contradictions(checks: list[Check]) -> list[Check]:
    """The checks, without an `ok` where another check of the same name found something."""
    bad = {check.name for check in checks if check.result in ("warning", "problem")}
    return [check for check in checks if check.result != "ok" or check.name not in bad]
