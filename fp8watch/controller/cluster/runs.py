"""The controller of many runs of a cluster: `RunController` fed with nodes' frames, and with a memory to hand over."""

from __future__ import annotations

import logging
from collections import Counter

from fp8watch import __version__, wire
from fp8watch.controller.cluster import memory
from fp8watch.controller.cluster.node_merge import NodeMerger
from fp8watch.controller.inbox import Inbox
from fp8watch.controller.run import RunPilot
from fp8watch.controller.service import RunController
from fp8watch.errors import WireError
from fp8watch.records import Hello, Layout, NodeFrame, RankLost, Reply, RunRecord, StepFrame, Stored, Uplink

logger = logging.getLogger(__name__)
LEFT_OUT = frozenset({"_orders", "_index", "_spots", "_nodes", "_tensors", "_modules"})
"""Not part of the memory: layouts are in the store already, and frames of open steps are still in Redis, unfinished."""


class ClusterPilot(RunPilot):
    """Decides for one run whose frames come node by node."""

    saves_detectors = False  # a standby has the whole pilot's memory

    _merger: NodeMerger

    def __init__(self, hello: Hello, *args: object, **kwargs: object) -> None:
        super().__init__(hello, *args, **kwargs)  # type: ignore[arg-type]
        self._merger = NodeMerger(hello.world_size)
        self._merger.restart(hello.step)

    def node(self, frame: NodeFrame) -> None:
        """A node's step."""
        if frame.attempt != self.attempt:
            self._unseen["superseded" if frame.attempt < self.attempt else "unannounced"] += len(frame.ranks)
            return
        for sample in self._merger.node(frame):
            self._observe(sample)

    @property
    def closed(self) -> tuple[int, int]:
        """Attempt and step up to which frames are done with."""
        return self.attempt, self._merger.closed

    def known_records(self) -> list[Stored]:
        """Checkpoints, open findings and actions."""
        return [*self._ledger.records(), *self._evidence.values(), *self._log.records()]

    def begin_term(self, term: int) -> None:
        """Another controller takes over: number under a term that no rank has seen. What is on its way stays so."""
        self._desk.learn_term(max(term, self._desk.term + 1) - 1)

    def know_layouts(self, layouts: list[Layout]) -> None:
        """What the store holds of the present attempt."""
        for layout in layouts:
            self.layout(layout)
        self.records.clear()

    def forget_open_steps(self) -> None:
        """The frames of steps that are not complete will be handed in again."""
        self._merger.hand_back()


class ClusterController(RunController):
    """`least_term` is that of the lease: commands never carry a smaller one."""

    _pilot_class = ClusterPilot
    least_term = 1

    _entry = ""
    """Of the run's stream: the one that is dealt with."""

    @property
    def _lease_term(self) -> int:
        return self.least_term

    def _new_inbox(self, name: str) -> Inbox:
        inbox = super()._new_inbox(name)
        inbox.passed(self._entry)
        return inbox

    def take(self, message: Uplink, entry_id: str = "") -> list[Reply]:
        """An agent's message, and the entry of the run's stream that it came as."""
        self._entry = entry_id
        known = self._runs.get(message.run)
        if known is not None:
            known.inbox.passed(entry_id)
        if isinstance(message, NodeFrame):
            run = self._runs.get(message.run)
            if run is None:
                self.ignored["no hello"] += 1
                return []
            assert isinstance(run.pilot, ClusterPilot)
            run.inbox.heard_at(message.time_unix)
            run.pilot.node(message)
            return self._flush(run)
        if isinstance(message, RankLost):
            return self.lost(message.run, message.rank)
        if isinstance(message, StepFrame):
            # No agent sends ranks' frames as they are, and a step of which only such are here could not be merged.
            self.ignored["frame of a rank"] += 1
            return []
        return self.receive(message)

    def pilot(self, name: str) -> ClusterPilot | None:
        """A run's pilot."""
        run = self._runs.get(name)
        pilot = run.pilot if run is not None else None
        assert pilot is None or isinstance(pilot, ClusterPilot)
        return pilot

    def memory(self, name: str) -> bytes | None:
        """Everything known of a run, for a successor; None: the run is not known."""
        run = self._runs.get(name)
        if run is None:
            return None
        state = memory.remember(run, LEFT_OUT)
        return memory.encode({"record": wire.pack(run.record), "run": state}, __version__)

    def adopt(self, name: str, data: bytes, layouts: list[Layout]) -> None:
        """Go on with a run where another controller stopped. Raises `ValueError` for a memory that does not fit."""
        found = memory.decode(data, __version__)
        try:
            record = wire.unpack_stored(found["record"])
        except WireError as error:
            raise ValueError(str(error)) from error
        if not isinstance(record, RunRecord):
            raise ValueError("memory without a run's record")
        run = self._start(record.hello, None)
        memory.recall(run, found["run"])
        pilot = run.pilot
        assert isinstance(pilot, ClusterPilot)
        pilot.forget_open_steps()
        pilot.know_layouts([layout for layout in layouts if layout.attempt == pilot.attempt])
        pilot.begin_term(self.least_term)
        run.inbox.taken_over(self.least_term)
        self._runs[name] = run

    def know_layouts(self, name: str, layouts: list[Layout]) -> None:
        """What the store holds of a run that was met without a memory of it."""
        run = self._runs.get(name)
        if run is None:
            return
        assert isinstance(run.pilot, ClusterPilot)
        run.pilot.know_layouts([item for item in layouts if item.attempt == run.pilot.attempt])
        run.inbox.layouts()

    def everything(self, name: str) -> list[Stored]:
        """Records of a run that are known here: what can be written again after Redis lost its data."""
        run = self._runs.get(name)
        if run is None:
            return []
        assert isinstance(run.pilot, ClusterPilot)
        return [run.record, *run.pilot.known_records()]

    def drop_all(self) -> None:
        """Another controller decides now: forget."""
        for name in self.names():
            self.forget(name)

    def forget(self, name: str) -> None:
        """A run is over and nobody of it is left."""
        self._runs.pop(name, None)
        self.open_findings.forget(name)

    def names(self) -> list[str]:
        """Runs that are known."""
        return list(self._runs)

    def failures(self) -> Counter[str]:
        """Detectors that failed, over all runs."""
        return Counter({name: run.pilot.detector_errors for name, run in self._runs.items()})

    def _first_term(self, hello: Hello) -> int:
        return max(self.least_term, hello.journal_term + 1)
