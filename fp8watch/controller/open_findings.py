"""What is wrong with each run now: its open incidents, reported to a listener whenever they change.

A counter of findings says that something was found. Only this says that it is still there, and so what was open when a
run was lost. Used by `RunController`, for /metrics of the agent and of the cluster's controller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fp8watch.detect.incidents import Incident

Open = frozenset[tuple[str, str, str]]
"""(detector, cause, severity) of every open incident; a detector has at most one."""


class OpenFindings:
    """Open incidents of all runs. `listener` gets (run, what is open) at first, even if empty, and at every change."""

    def __init__(self, listener: Callable[[str, Open], None] | None = None) -> None:
        self._listener = listener
        self._said: dict[str, Open] = {}

    def look(self, run: str, incidents: Iterable[Incident]) -> None:
        """Update what is open in a run."""
        found = frozenset((incident.detector, incident.cause, incident.severity) for incident in incidents)
        if self._said.get(run) != found:
            self._said[run] = found
            if self._listener is not None:
                self._listener(run, found)

    def forget(self, run: str) -> None:
        """The run is not known here any more. If it comes back, what is open is reported again at first."""
        self._said.pop(run, None)
