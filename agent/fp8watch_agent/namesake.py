"""Detects another live agent under this node's name.

Both agents write their identity into the same field of the hash `fp8watch:nodes`. If the field repeatedly holds another
identity when this agent writes it again, the other agent is alive. A predecessor that is exiting writes it once or
twice at most.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

TIMES = 3
"""How often another identity must be seen before it counts as alive."""
FORGET_SECONDS = 30.0
"""After this long without being seen, the other agent is gone."""


class Namesake:
    """`pid` and `started_unix` identify this process. `clock` is monotonic, in seconds."""

    def __init__(self, pid: int, started_unix: float, clock: Callable[[], float]) -> None:
        self._own = (pid, started_unix)
        self._clock = clock
        self._has_written = False
        self._times = 0
        self._heard_at = 0.0
        self._other = ""

    def look(self, body: bytes | None) -> str:
        """`body` is the field's content before this process writes it. Returns a description of the other agent, or
        ""."""
        now = self._clock()
        if now - self._heard_at > FORGET_SECONDS:
            self._times = 0
        other = _decoded(body)
        if self._has_written and other and (other.get("pid"), other.get("started_unix")) != self._own:
            self._times += 1
            self._heard_at = now
            self._other = f"process {other.get('pid')} on host {other.get('host') or '?'}"
        self._has_written = True
        return self._other if self._times >= TIMES else ""


def _decoded(body: bytes | None) -> dict[str, Any]:
    try:
        found = json.loads(body or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
