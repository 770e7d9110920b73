"""Runs a stored run through the live controller again: the same messages in the same order, hence the same decisions.

Nothing is simulated: hellos, frames, results of commands, lost ranks, disarming, verdicts and restarts of the
controller come from the store (`Arrival`, `StepFrame.arrival`). Times are those of the messages. The decision log
(`TraceEntry`) is the same as the live controller's, byte for byte, unless frames have been pruned.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import msgspec

from fp8watch import wire
from fp8watch.controller.cluster.runs import ClusterController
from fp8watch.controller.inbox import PROCESS_BITS, entry_number
from fp8watch.controller.service import RunController
from fp8watch.controller.stores.base import Approval, Store
from fp8watch.controller.stores.memory import MemoryStore
from fp8watch.detect.base import Sample
from fp8watch.detect.pipeline import Pipeline
from fp8watch.errors import WireError
from fp8watch.policy.view import Trouble, trouble_of
from fp8watch.records import (
    Arrival,
    CheckpointRecord,
    Finding,
    Hello,
    Layout,
    NodeFrame,
    RunRecord,
    StepFrame,
    Stored,
    TraceEntry,
)
from fp8watch.replay.recording import Facts, Seen

logger = logging.getLogger(__name__)
_approval = msgspec.msgpack.Decoder(Approval)


BeforeSample = Callable[[Sample, Pipeline], None]
"""Called with each sample before the detectors see it, and with the detectors in their state before it."""


class _Tapped(Pipeline):
    """The detectors of a replayed run; they also keep what they see, for the replay."""

    def __init__(self, run: str, seen: list[tuple[Sample, Pipeline]], before: BeforeSample | None) -> None:
        super().__init__(run)
        self._seen = seen
        self._before = before

    def observe(self, sample: Sample) -> list[Finding]:
        if self._before is not None:
            self._before(sample, self)
        findings = super().observe(sample)
        self._seen.append((sample, self))
        return findings


class _Late(RunController):
    """A controller with the events that do not reach it as messages."""

    def late(self, name: str, rank: int | None) -> None:
        """Stop waiting for a rank's frames."""
        run = self._runs.get(name)
        if run is not None:
            run.pilot.late(rank)
            self._flush(run)


class _Embedded(_Late):
    """The controller on the training node."""


class _OfCluster(_Late, ClusterController):
    """The controller of a cluster, which gets node frames; also a standby that takes over."""

    def taken_over(self, name: str, term: int) -> None:
        """A standby takes over with all that was known; only the commands are numbered anew."""
        self.least_term = term
        pilot = self.pilot(name)
        if pilot is not None:
            pilot.begin_term(term)


class _NodeFrames(Protocol):
    """A store that has node frames."""

    def node_frames(self, run: str) -> Iterator[tuple[str, NodeFrame]]: ...


class Reenactment:
    """One pass over one run. Iterating `steps` updates `facts`."""

    def __init__(
        self, store: Store, run: str, facts: Facts | None = None, *, before: BeforeSample | None = None
    ) -> None:
        self._store = store
        self._before = before
        self._run = run
        self.facts = facts or Facts()
        self._memory = MemoryStore(keep_frames=False)
        self._heard: list[Stored] = []
        self._taps: list[tuple[Sample, Pipeline]] = []
        self._layouts: dict[str, Layout] = {}
        self._disarmed = ""
        self._process = 0
        self._nodes: Iterator[tuple[str, NodeFrame]] | None = None
        """(entry, frame), for a run of a cluster."""
        if hasattr(store, "node_frames"):
            self._nodes = cast(_NodeFrames, store).node_frames(run)
        self._controller: _Embedded | _OfCluster | None = None
        self.pipeline: Pipeline | None = None
        """The detectors after the last step."""

    def steps(self) -> Iterator[Seen]:
        """Every step that the live detectors saw, with its findings and decisions. Log lines that belong to no step
        come with the next one; those after the last step come in an extra entry that repeats its sample."""
        for layout in self._store.read(self._run, Layout):
            self._layouts[f"{layout.attempt}/{layout.rank}/{layout.layout_id}"] = layout
        trace: list[TraceEntry] = []
        last: Seen | None = None
        for told in self._told():
            self._tell(told)
            findings = [item for item in self._heard if isinstance(item, Finding)]
            trace += [item for item in self._heard if isinstance(item, TraceEntry)]
            self._heard.clear()
            taps, self._taps[:] = list(self._taps), []
            for number, (sample, pipeline) in enumerate(taps):
                self.pipeline = pipeline
                here = [item for item in findings if (item.attempt, item.step) == (sample.attempt, sample.step)]
                is_last = number == len(taps) - 1
                last = Seen(
                    sample=sample, findings=here, troubles=lambda pipeline=pipeline: self._troubles(pipeline),  # type: ignore[misc]
                    trace=trace if is_last else [],
                )  # fmt: skip
                if is_last:
                    trace = []
                yield last
        if trace and last is not None:
            yield Seen(sample=last.sample, findings=[], troubles=lambda: (), trace=trace)

    def _told(self) -> Iterator[StepFrame | NodeFrame | Arrival]:
        """Everything in order of arrival."""
        arrivals = self._store.read(self._run, Arrival)
        if self._nodes is None:
            frames: Iterator[tuple[int, StepFrame | Arrival]] = (
                (frame.arrival, frame) for frame in self._store.read(self._run, StepFrame)
            )
            numbered: Iterator[tuple[int, StepFrame | Arrival]] = ((item.sequence, item) for item in arrivals)
            yield from (told for _, told in heapq.merge(frames, numbered, key=lambda item: item[0]))
            return
        waiting = next(self._nodes, None)
        for arrival in arrivals:
            while waiting is not None and entry_number(waiting[0]) <= entry_number(arrival.after):
                yield waiting[1]
                waiting = next(self._nodes, None)
            yield arrival
        if waiting is not None:
            yield waiting[1]
            yield from (frame for _, frame in self._nodes)

    def _troubles(self, pipeline: Pipeline) -> tuple[Trouble, ...]:
        return tuple(
            trouble_of(
                incident, name=f"{self._process}-{incident.id}", finding=incident.findings[-1],
                evidence=incident.evidence,
            )
            for incident in pipeline.open_incidents()
        )  # fmt: skip

    def _tell(self, told: StepFrame | NodeFrame | Arrival) -> None:
        controller = self._controller
        try:
            if isinstance(told, Arrival):
                self._arrived(told)
            elif isinstance(controller, _OfCluster):
                if isinstance(told, NodeFrame) and not controller.refusal(told, told.node):
                    controller.take(told)
            elif controller is not None and isinstance(told, StepFrame):
                controller.receive(told)
        except WireError as error:
            logger.warning("an entry of run %s cannot be read: %s", self._run, error)
        except Exception:
            # The live agent continued after the same exception (fp8watch_agent.session).
            logger.exception("the controller failed on a message of run %s", self._run)

    def _arrived(self, told: Arrival) -> None:
        if told.kind == "opened":
            self._opened(told)
        controller = self._controller
        if controller is None or told.kind == "opened":
            return
        if told.kind == "layout":
            layout = self._layouts.get(told.key)
            if layout is not None:
                controller.receive(layout)
        elif told.kind == "lost":
            controller.lost(self._run, int(told.key))
        elif told.kind == "late":
            controller.late(self._run, int(told.key) if told.key else None)
        elif isinstance(controller, _OfCluster) and told.kind == "taken_over":
            controller.taken_over(self._run, told.term)
        elif isinstance(controller, _OfCluster) and told.kind == "layouts":
            controller.know_layouts(self._run, list(self._layouts.values()))
        elif told.kind == "disarmed":
            self._disarmed = told.key
            controller.look()
        elif told.kind == "approval":
            self._memory.approve(_approval.decode(told.body))
            controller.look()
        else:
            message = wire.unpack_message(told.body)
            if isinstance(message, Hello):
                self._greeted(message)
            if isinstance(message, CheckpointRecord):
                self.facts.saved.append(message)
            if isinstance(message, Hello) and isinstance(controller, _OfCluster) and told.key:
                controller.hold(message, told.key)
            controller.receive(message)

    def _opened(self, told: Arrival) -> None:
        """A controller process opened the run, for the first time or after a restart; or training was started anew."""
        known = next(iter(self._memory.runs()), None)
        if known is not None:
            # The last step that the store knew depends on when it was last written, not on the run.
            self._memory.append(self._run, [msgspec.structs.replace(known, last_step=told.step)])
        process = told.sequence >> PROCESS_BITS
        if process != self._process or self._controller is None:
            self._process = process
            self._disarmed = ""
            options: dict[str, Any] = {"max_mode": told.key} if told.key else {}
            kind = _Embedded if self._nodes is None else _OfCluster
            self._controller = kind(
                self._memory, clock=lambda: 0.0, listener=self._heard.append, disarmed_by=lambda _: self._disarmed,
                make_pipeline=lambda run: _Tapped(run, self._taps, self._before), **options,
            )  # fmt: skip
        if isinstance(self._controller, _OfCluster) and told.term:
            self._controller.least_term = told.term

    def _greeted(self, hello: Hello) -> None:
        self.facts.unavailable = {name: why for name, why in hello.capabilities.items() if why}
        self.facts.warmup_steps = hello.warmup_steps
        self.facts.policy = hello.policy


def has_journal(store: Store, run: str) -> bool:
    """Whether the store has what a re-enactment needs. Earlier versions kept frames only, or for a cluster kept other
    messages without their place among the frames."""
    arrivals = store.read(run, Arrival)
    if hasattr(store, "node_frames"):
        return any(item.after for item in arrivals)
    return next(iter(arrivals), None) is not None


def stored_trace(store: Store, run: str) -> Iterator[TraceEntry]:
    """The decision log that the live controller wrote."""
    yield from store.read(run, TraceEntry)


def run_record(store: Store, run: str) -> RunRecord | None:
    """The store's record of the run; None if it has none."""
    return next((record for record in store.runs() if record.run == run), None)
