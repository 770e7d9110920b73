"""One line of `fp8watch doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What was looked at and what came of it. `absent`: not there or not observable, and not needed."""

    name: str
    result: Literal["ok", "absent", "problem"]
    detail: str


def problem(name: str, detail: str) -> Check:
    """Something that has to be put right."""
    return Check(name=name, result="problem", detail=detail)
