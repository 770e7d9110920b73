"""What /metrics shows: fed by the server and the controller, read by scrapes on other threads.

One lock, held for the microseconds a frame takes to be taken in and for the copying of one run, never while
series or text are made. No destructor, signal handler or garbage collection callback takes it.

Bounded in the number of runs and tensors: ended runs go after a while, and earlier where there is no room.
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
"""Runs kept at once, ended ones included."""
MAX_TENSORS_TOGETHER = 200_000
"""Tensors of all these runs; about 1 KiB each, and 20 bytes more for each further local rank."""
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
        self._series = SeriesBudget(series_budget, worst_layers)
        self._making = threading.Lock()
        """Held while an exposition is made. Only readers wait for it."""
        self._ttl_seconds = ended_ttl_seconds
        self._mode_of = mode_of
        self.about_process = about_process
        self._lock = threading.Lock()
        self._runs: dict[str, RunMetrics] = {}
        self._not_kept: dict[str, None] = {}
        """Live runs there was no room for, the latest of them."""
        self._num_not_kept = 0
        """Such runs, and tensors there was no room for, since the last exposition: each at least one series."""

    def observe(self, message: Message) -> None:
        """Take in what a rank sent. Raises `WireError` when its columns do not fit its layout."""
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
        """Take in the tensors of all local ranks, reduced, or their layout. Their scalars come rank by rank.

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
            self._not_kept.pop(run, None)
            if run in self._runs and self._runs[run].state == "running":
                is_halted = state == "ended" and self._runs[run].is_halted
                self._runs[run].set_state("halted" if is_halted else state, self._clock())

    def tokens(self) -> dict[str, float]:
        """Tokens that the running runs have trained on, as their local ranks say."""
        with self._lock:
            return {name: run.tokens for name, run in self._runs.items() if name and run.state == "running"}

    def let_go(self) -> None:
        """Forget runs that ended long ago. Called about once a second, whether anybody scrapes or not."""
        now = self._clock()
        with self._lock:
            for name, run in list(self._runs.items()):
                if name != NO_RUN and not run.is_live and now - run.state_since > self._ttl_seconds:
                    del self._runs[name]

    def snapshot(self) -> list[families.Family]:
        """All families with their samples now, within the series budget."""
        with self._making:
            self.let_go()
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
        """The run of this name; one that nobody will see where there is no room for it."""
        if name in self._runs:
            return self._runs[name]
        run = RunMetrics(name)
        if name != NO_RUN:
            run.set_state("running", self._clock())
            if len(self._runs) >= MAX_RUNS:
                # First what no rank was heard of, then what ended first.
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
        """Whether a layout's tensors can be kept: those of ended runs give way. Else they are not on /metrics, which is
        counted and logged, and everything else goes on."""
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
