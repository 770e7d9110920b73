"""The state behind /metrics. The server and the controller update it; scrapes read it on other threads.

One lock guards it. It is held while one message is applied (microseconds) or one run is copied, never while series or
text are made. No destructor, signal handler or garbage collection callback takes it.

The number of runs and tensors is bounded. Ended runs are removed after a while, or earlier to make room.
"""

from __future__ import annotations

import logging
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
from fp8watch_agent.series_budget import SeriesBudget
from fp8watch_agent.tensor_metrics import MAX_TENSORS, TensorMetrics, TensorView

logger = logging.getLogger(__name__)
MAX_RUNS = 1000
"""Maximum number of runs, ended ones included."""
MAX_TENSORS_TOGETHER = 200_000
"""Maximum number of tensors of all runs. Each takes about 1 KiB, and 20 bytes for each further local rank."""
WHOLE_NODE = -1
"""Rank number for frames that hold the tensors of all local ranks."""
NO_RUN = ""
"""Label value for what belongs to no run, such as bytes of an unknown client."""


class MetricsState:
    """The metrics of all runs of this process. `clock` is monotonic, in seconds."""

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
        """`about_process` returns families about the process and its machine. It is called at every scrape."""
        self._clock = clock
        self._series = SeriesBudget(series_budget, worst_layers)
        self._making = threading.Lock()
        """Held while an exposition is made. Only scrapes wait for it."""
        self._ttl_seconds = ended_ttl_seconds
        self._mode_of = mode_of
        self.about_process = about_process
        self._lock = threading.Lock()
        self._runs: dict[str, RunMetrics] = {}
        self._not_kept: dict[str, None] = {}
        """The latest live runs that there was no room for."""
        self._num_not_kept = 0
        """Runs and tensors without room since the last exposition. Each would have had at least one series."""

    def observe(self, message: Message) -> None:
        """Apply a rank's message. Raises `WireError` when its columns do not fit its layout."""
        now = self._clock()
        mode = self._mode_of(message) if isinstance(message, Hello) and self._mode_of is not None else None
        with self._lock:
            run = self._run(message.run)
            run.is_heard = True
            if isinstance(message, StepFrame):
                run.frame(message, now)
            elif isinstance(message, Layout):
                run.layout(message, is_kept=self._has_room(run, message))
            elif isinstance(message, Hello):
                run.greet(message, now)
                run.mode = mode or run.mode
            elif isinstance(message, Goodbye):
                run.goodbye(message)
            elif isinstance(message, Evaluation):
                run.evaluations.update(message.scores)

    def observe_node(self, message: NodeFrame | Layout) -> None:
        """Apply the merged tensors of all local ranks, or their layout. Scalars arrive per rank, through `observe`.

        Raises `WireError` when the columns do not fit the layout.
        """
        now = self._clock()
        with self._lock:
            run = self._run(message.run)
            tensors = run.tensors
            if isinstance(message, Layout):
                if self._has_room(run, message):
                    tensors.layout(msgspec.structs.replace(message, rank=WHOLE_NODE))
                else:
                    tensors.forget_rank(WHOLE_NODE)
                return
            frame = StepFrame(
                run=message.run, attempt=message.attempt, rank=WHOLE_NODE, step=message.step,
                layout_id=message.layout_id, time_unix=message.time_unix, scalars={}, columns=message.columns,
            )  # fmt: skip
            for quantity, count in tensors.observe(frame, now).items():
                run.nonfinite[quantity] += count

    def record(self, stored: Stored) -> None:
        """Apply a record that the controller has stored. Passed to `RunController` as its listener."""
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
        """Count frames that no detector has seen, as the controller reports."""
        with self._lock:
            self._run(run).unseen[reason] += count

    def open_findings(self, run: str, found: Open) -> None:
        """Set the findings open now, as the controller reports. They stay when the run is over."""
        with self._lock:
            self._run(run).open = found

    def store_error(self, run: str) -> None:
        """Count a failed write to the store."""
        with self._lock:
            self._run(run).store_errors += 1

    def rank_left(self, run: str, rank: int) -> None:
        """A rank is gone for good while other ranks of its run continue."""
        with self._lock:
            if run in self._runs:
                self._runs[run].forget_rank(rank)

    def run_over(self, run: str, state: str) -> None:
        """No rank of the run is left. Keeps a state that the controller has already set."""
        with self._lock:
            self._not_kept.pop(run, None)
            if run in self._runs and self._runs[run].state == "running":
                is_halted = state == "ended" and self._runs[run].is_halted
                self._runs[run].set_state("halted" if is_halted else state, self._clock())

    def tokens(self) -> dict[str, float]:
        """Tokens that each running run has trained on, summed over its local ranks."""
        with self._lock:
            return {name: run.tokens for name, run in self._runs.items() if name and run.state == "running"}

    def remove_ended(self) -> None:
        """Remove runs that ended long ago. Called about once a second, independent of scrapes."""
        now = self._clock()
        with self._lock:
            for name, run in list(self._runs.items()):
                if name != NO_RUN and not run.is_live and now - run.state_since > self._ttl_seconds:
                    del self._runs[name]

    def snapshot(self) -> list[families.Family]:
        """All families with their current samples, within the series budget."""
        with self._making:
            self.remove_ended()
            about = [] if self.about_process is None else self.about_process()
            now = self._clock()
            with self._lock:
                names = list(self._runs)
                self._series.left_out(self._num_not_kept)
                self._num_not_kept = 0
            heads = [head for name in names if (head := self._head(name)) is not None]
            return self._series.build(heads, lambda name: self._tensors(name, now), about, now)

    def _head(self, name: str) -> RunMetrics | None:
        with self._lock:
            run = self._runs.get(name)
            return None if run is None else run.head()

    def _tensors(self, name: str, now: float) -> TensorView | None:
        with self._lock:
            run = self._runs.get(name)
            return None if run is None else run.tensors.view(now)

    def _run(self, name: str) -> RunMetrics:
        """The run of this name. If there is no room for it, a new object that is not exported."""
        if name in self._runs:
            return self._runs[name]
        run = RunMetrics(name)
        if name != NO_RUN:
            run.set_state("running", self._clock())
            if len(self._runs) >= MAX_RUNS:
                # Remove first a run without messages from ranks, then the one that ended first.
                others = [other for other in self._runs.values() if other.run != NO_RUN and not other.is_live]
                if not others:
                    self._leave_out(name)
                    return run
                del self._runs[min(others, key=lambda other: (other.is_heard, other.state_since)).run]
        self._runs[name] = run
        return run

    def _leave_out(self, name: str) -> None:
        if name in self._not_kept:
            return
        if not self._not_kept:
            logger.warning("%d runs train here at once: run %s is not on /metrics", MAX_RUNS, name)
        self._num_not_kept += 1
        self._not_kept[name] = None
        while len(self._not_kept) > MAX_RUNS:
            del self._not_kept[next(iter(self._not_kept))]

    def _has_room(self, run: RunMetrics, layout: Layout) -> bool:
        """Whether there is room for a layout's tensors, if need be in place of those of ended runs. If not, they are
        not exported, which is counted and logged; everything else of the run is."""
        num_new, num_own = run.tensors.num_new(layout), len(run.tensors.modules)
        if num_new == 0 or self._runs.get(run.run) is not run:
            return True
        held = sum(len(other.tensors.modules) for other in self._runs.values())
        if num_own + num_new <= MAX_TENSORS:
            ended = [other for other in self._runs.values() if other is not run and not other.is_live]
            for other in sorted(ended, key=lambda other: other.state_since):
                if held + num_new <= MAX_TENSORS_TOGETHER:
                    break
                held -= len(other.tensors.modules)
                other.tensors = TensorMetrics()
            if held + num_new <= MAX_TENSORS_TOGETHER:
                return True
        self._num_not_kept += num_new
        logger.warning("run %s: its %d tensors are not on /metrics: %d are kept already", run.run, num_new, held)
        return False
