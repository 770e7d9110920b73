"""The controller of a cluster's runs: a `RunController` that takes node frames and can hand its memory over."""

from __future__ import annotations

import logging
from collections import defaultdict

import msgspec

from fp8watch import __version__, wire
from fp8watch.controller.cluster import holders, memory
from fp8watch.controller.cluster.node_merge import NodeMerger
from fp8watch.controller.inbox import Inbox
from fp8watch.controller.run import RunPilot
from fp8watch.controller.service import RunController
from fp8watch.errors import WireError
from fp8watch.records import (
    Command,
    Hello,
    Layout,
    LedgerUpdate,
    NodeFrame,
    RankLost,
    Reply,
    RunRecord,
    StepFrame,
    Stored,
    Uplink,
)

logger = logging.getLogger(__name__)
LEFT_OUT = frozenset({"_orders", "_index", "_spots", "_nodes", "_tensors", "_modules"})
"""Attributes not in the memory: layouts are in the store, and frames of open steps are still pending in Redis."""


class ClusterPilot(RunPilot):
    """Decides for one run whose frames arrive node by node."""

    saves_detectors = False  # a standby gets the memory of the whole pilot
    needs_catch_up = False
    """A frame came that fits no hello or no layout known here: the ranks may have said what never arrived."""

    _merger: NodeMerger

    def __init__(self, hello: Hello, *args: object, **kwargs: object) -> None:
        super().__init__(hello, *args, **kwargs)  # type: ignore[arg-type]
        self._merger = NodeMerger(hello.world_size)
        self._merger.restart(hello.step)

    def node(self, frame: NodeFrame) -> None:
        """Take a node's frame of one step."""
        if frame.attempt != self.attempt:
            self._unseen["superseded" if frame.attempt < self.attempt else "unannounced"] += len(frame.ranks)
            self.needs_catch_up = True
            return
        self.needs_catch_up |= frame.step <= self._merger.closed or not self._merger.can_read(frame)
        for sample in self._merger.node(frame):
            self._observe(sample)

    @property
    def closed(self) -> tuple[int, int]:
        """Attempt and step up to which all frames have been processed."""
        return self.attempt, self._merger.closed

    def knows(self, layout: Layout) -> bool:
        """Whether the order of columns is known, or is none of this attempt."""
        return layout.attempt != self.attempt or self._merger.knows(layout)

    def known_records(self) -> list[Stored]:
        """Records of checkpoints, open findings and actions."""
        return [*self._ledger.records(), *self._evidence.values(), *self._log.records()]

    def begin_term(self, term: int) -> None:
        """Number commands under a term that no rank has seen, as this controller takes over. Commands already sent
        stay in progress."""
        self._tracker.learn_term(max(term, self._tracker.term + 1) - 1)

    def know_layouts(self, layouts: list[Layout]) -> None:
        """Learn the stored layouts of the current attempt."""
        for layout in layouts:
            self.layout(layout)
        self.records.clear()

    def forget_open_steps(self) -> None:
        """Forget the frames of incomplete steps: they will be read again."""
        self._merger.hand_back()


class ClusterController(RunController):
    """`least_term` is the term of the lease: commands never carry a smaller one."""

    _pilot_class = ClusterPilot
    least_term = 1

    _entry = ""
    """Id of the stream entry being processed."""
    _node = ""
    """The node that it came from."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.nodes: defaultdict[str, dict[int, str]] = defaultdict(dict)
        """Run -> rank -> the node that holds it, or held it last."""
        self._failures: dict[str, Exception] = {}

    @property
    def _lease_term(self) -> int:
        return self.least_term

    def _new_inbox(self, name: str) -> Inbox:
        inbox = super()._new_inbox(name)
        inbox.passed(self._entry, self._node)
        return inbox

    def refusal(self, message: Uplink, node: str) -> holders.Refusal:
        """Why this node may not say this of a run; empty: it may."""
        pilot = self.pilot(message.run)
        return holders.refusal(message, node, pilot.ranks, self.nodes[message.run]) if pilot is not None else ""

    def hold(self, hello: Hello, node: str) -> None:
        """A rank is on this node from now on."""
        known = self._runs.get(hello.run)
        if known is not None and holders.is_other_owner(known.record.hello, hello):
            self.nodes[hello.run].clear()  # another user's run of that name, which is over
        self.nodes[hello.run][hello.rank] = node

    def take(self, message: Uplink, entry_id: str = "", node: str = "") -> list[Reply]:
        """Take an agent's message, which came from this node as this entry of the run's stream."""
        self._entry, self._node = entry_id, node
        run = self._runs.get(message.run)
        if run is not None:
            run.inbox.passed(entry_id, node)
        if isinstance(message, Hello) and node:
            self.hold(message, node)
        if isinstance(message, NodeFrame):
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
            # Agents send node frames only, and a step for which only rank frames were here could not be merged.
            self.ignored["frame of a rank"] += 1
            return []
        return self.receive(message)

    def pilot(self, name: str) -> ClusterPilot | None:
        """The pilot of a run; None if the run is unknown."""
        run = self._runs.get(name)
        pilot = run.pilot if run is not None else None
        assert pilot is None or isinstance(pilot, ClusterPilot)
        return pilot

    def by_node(self, name: str) -> dict[str, list[int]]:
        """The ranks of a run that are there, by the node that holds them."""
        found: dict[str, list[int]] = {}
        for rank in pilot.ranks if (pilot := self.pilot(name)) is not None else ():
            if (node := self.nodes[name].get(rank)) is not None:
                found.setdefault(node, []).append(rank)
        return found

    def needs_catch_up(self, name: str) -> bool:
        """Whether frames came that cannot be judged by what is known here."""
        pilot = self.pilot(name)
        return pilot is None or pilot.needs_catch_up

    def has_caught_up(self, name: str) -> None:
        """What could be found out about those frames is known now."""
        if (pilot := self.pilot(name)) is not None:
            pilot.needs_catch_up = False

    def memory(self, name: str) -> bytes | None:
        """Everything known about a run, for a successor; None if the run is unknown."""
        run = self._runs.get(name)
        if run is None:
            return None
        state = memory.remember(run, LEFT_OUT)
        return memory.encode({"record": wire.pack(run.record), "run": state}, __version__)

    def adopt(self, name: str, data: bytes, layouts: list[Layout]) -> None:
        """Continue a run where another controller stopped. Raises `ValueError` for a memory that does not fit."""
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
        """Learn the stored layouts of a run that was taken over without a memory."""
        run = self._runs.get(name)
        if run is None:
            return
        assert isinstance(run.pilot, ClusterPilot)
        run.pilot.know_layouts([item for item in layouts if item.attempt == run.pilot.attempt])
        run.inbox.layouts()

    def everything(self, name: str) -> list[Stored]:
        """All records of a run known here: they are written again after Redis has lost its data."""
        run = self._runs.get(name)
        if run is None:
            return []
        assert isinstance(run.pilot, ClusterPilot)
        return [run.record, *run.pilot.known_records()]

    def drop_all(self) -> None:
        """Forget all runs: another controller decides now."""
        for name in self.names():
            self.forget(name)

    def forget(self, name: str) -> None:
        """Forget a run that is over and has no ranks left."""
        self._runs.pop(name, None)
        self.nodes.pop(name, None)
        self.open_findings.forget(name)

    def names(self) -> list[str]:
        """Names of the known runs."""
        return list(self._runs)

    def _first_term(self, hello: Hello) -> int:
        return max(self.least_term, hello.journal_term + 1)

    def _failed(self, name: str, error: Exception) -> None:
        self._failures[name] = error

    def taken_failures(self) -> list[tuple[str, Exception]]:
        """Runs for which regular work has failed since the last call, and how."""
        failures, self._failures = self._failures, {}
        return list(failures.items())

    def _signed(self, reply: Reply) -> Reply:
        if isinstance(reply, Command | LedgerUpdate):
            pilot = self.pilot(reply.run)
            held = self.nodes[reply.run]
            nodes = sorted({held[rank] for rank in (pilot.ranks if pilot is not None else ()) if rank in held})
            reply = msgspec.structs.replace(reply, nodes=nodes)
        return super()._signed(reply)
