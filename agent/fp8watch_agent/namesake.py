"""Whether another agent is alive under this node's name.

Both write what they are into the same field of `fp8watch:nodes`. Who finds there, again and again, what another process
has written since its own last time has a living namesake: a predecessor that is ending writes once or twice at most.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

TIMES = 3
"""How often another's word must be found before it counts as alive."""
FORGET_SECONDS = 30.0
"""After this long without a word from it, it is gone."""


class Namesake:
    """`pid` and `started_unix` tell this process from others; `clock` is monotonic, in seconds."""

    def __init__(self, pid: int, started_unix: float, clock: Callable[[], float]) -> None:
        self._own = (pid, started_unix)
        self._clock = clock
        self._has_written = False
        self._times = 0
        self._heard_at = 0.0
        self._other = ""

    def look(self, body: bytes | None) -> str:
        """`body`: what the field holds before this process writes it. Returns who the other is; empty: nobody."""
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
