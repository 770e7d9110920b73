"""What /metrics shows: fed by the server and the controller, read by scrapes on other threads.

One lock, held for the microseconds a frame takes to be taken in and for the copying of a snapshot, never
while text is made. No destructor, signal handler or garbage collection callback takes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from fp8watch.controller.open_findings import Open
from fp8watch.records import (
    ActionRecord,
    Evaluation,
    Finding,
    Goodbye,
    Hello,
    Layout,
    Message,
    NodeFrame,
    RunRecord,
    StepFrame,
    Stored,
)
from fp8watch_agent import families
from fp8watch_agent.run_metrics import RunMetrics

WHOLE_NODE = -1
"""Stands for a rank where the frames of all local ranks have been reduced to one."""
NO_RUN = ""
"""Label of what cannot be put down to a run, such as bytes of a foreign client."""


class MetricsState:
    """State of all runs of this process. `clock` is monotonic, in seconds."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        series_budget: int = 5000,
        worst_layers: int = 10,
        ended_ttl_seconds: float = 600.0,
        mode_of: Callable[[Hello], str] | None = None,
        about_process: Callable[[], list[families.Family]] | None = None,
    ) -> None:
        """`about_process`: families of the process and its machine, asked for at every scrape."""
        self._clock = clock
        self._budget = series_budget
        self._worst_layers = worst_layers
        self._ttl_seconds = ended_ttl_seconds
        self._mode_of = mode_of
        self.about_process = about_process
        self._lock = threading.Lock()
        self._runs: dict[str, RunMetrics] = {}

    def observe(self, message: Message) -> None:
        """Take in what a rank sent. Raises `WireError` when its columns do not fit its layout."""
        now = self._clock()
        mode = self._mode_of(message) if isinstance(message, Hello) and self._mode_of is not None else None
        with self._lock:
            run = self._run(message.run)
            if isinstance(message, StepFrame):
                run.frame(message, now)
            elif isinstance(message, Layout):
                run.layout(message)
            elif isinstance(message, Hello):
                run.greet(message, now)
                run.mode = mode or run.mode
            elif isinstance(message, Goodbye):
                run.goodbye(message)
            elif isinstance(message, Evaluation):
                run.evaluations.update(message.scores)

    def observe_node(self, message: NodeFrame | Layout) -> None:
        """Take in the tensors of all local ranks, reduced, or their layout. Their scalars come rank by rank.

        Raises `WireError` when the columns do not fit the layout.
        """
        now = self._clock()
        with self._lock:
            tensors = self._run(message.run).tensors
            if isinstance(message, Layout):
                tensors.layout(msgspec.structs.replace(message, rank=WHOLE_NODE))
                return
            run = self._run(message.run)
            frame = StepFrame(
                run=message.run, attempt=message.attempt, rank=WHOLE_NODE, step=message.step,
                layout_id=message.layout_id, time_unix=message.time_unix, scalars={}, columns=message.columns,
            )  # fmt: skip
            for quantity, count in tensors.observe(frame, now).items():
                run.nonfinite[quantity] += count

    def record(self, stored: Stored) -> None:
        """Take in what the controller stored: the listener of `RunController`."""
        with self._lock:
            run = self._run(stored.run)
            if isinstance(stored, Finding):
                run.finding(stored)
            elif isinstance(stored, ActionRecord):
                run.action(stored)
            elif isinstance(stored, RunRecord):
                run.set_state(stored.state, self._clock())

    def drop(self, run: str | None, reason: str) -> None:
        """Count a message that this process dropped."""
        with self._lock:
            self._run(run or NO_RUN).dropped[reason] += 1

    def unseen(self, run: str, reason: str, count: int) -> None:
        """Count frames that no detector sees: the controller's word."""
        with self._lock:
            self._run(run).unseen[reason] += count

    def open_findings(self, run: str, found: Open) -> None:
        """What is wrong with a run now: the controller's word, which stands when the run is over."""
        with self._lock:
            self._run(run).open = found

    def store_error(self, run: str) -> None:
        """Count a write to the store that failed."""
        with self._lock:
            self._run(run).store_errors += 1

    def rank_left(self, run: str, rank: int) -> None:
        """A rank is gone and will not be back while others of its run go on."""
        with self._lock:
            if run in self._runs:
                self._runs[run].forget_rank(rank)

    def run_over(self, run: str, state: str) -> None:
        """No rank is left; keeps a state that the controller has already given."""
        with self._lock:
            if run in self._runs and self._runs[run].state == "running":
                is_halted = state == "ended" and self._runs[run].is_halted
                self._runs[run].set_state("halted" if is_halted else state, self._clock())

    def tokens(self) -> dict[str, float]:
        """Tokens that the running runs have trained on, as their local ranks say."""
        with self._lock:
            return {name: run.tokens for name, run in self._runs.items() if name and run.state == "running"}

    def snapshot(self) -> list[families.Family]:
        """All families with their samples now, within the series budget; what ended long ago is let go."""
        now = self._clock()
        with self._lock:
            for name, run in list(self._runs.items()):
                if run.state != "running" and now - run.state_since > self._ttl_seconds:
                    del self._runs[name]
            found = families.build(list(self._runs.values()), now, self._budget)
        if self.about_process is None:
            return found
        about = {family.metric.name: family for family in self.about_process()}
        return [about.get(family.metric.name, family) for family in found]

    def _run(self, name: str) -> RunMetrics:
        if name not in self._runs:
            self._runs[name] = RunMetrics(name, self._worst_layers)
            if name == NO_RUN:
                return self._runs[name]
            self._runs[name].set_state("running", self._clock())
        return self._runs[name]
