"""What a controller remembers of a run, laid over a fresh one: the same decisions follow as without the change."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from typing import Any

import hand_made as make
import msgspec
import pytest
from cluster_parts import POLICY

from fp8watch import __version__
from fp8watch.controller.cluster import memory
from fp8watch.controller.cluster.runs import ClusterController
from fp8watch.controller.stores.memory import MemoryStore
from fp8watch.records import ACTIONS, ActionRecord, Command, CommandResult, Finding, NodeFrame, Reply


class Nodes:
    """Two nodes of one rank each, and who decides for them; `swap_at` steps hand over to a fresh controller."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.controller = self.fresh()
        self.waiting: list[Command] = []
        self.applied: list[Command] = []
        self.layouts = [make.layout("r", rank=rank, blocks=3) for rank in range(2)]
        for rank in range(2):
            self.take(
                self.controller.take(
                    make.hello("r", rank=rank, world_size=2, policy=POLICY, capabilities=dict.fromkeys(ACTIONS, ""))
                )
            )
            self.take(self.controller.take(self.layouts[rank]))

    def fresh(self) -> ClusterController:
        return ClusterController(self.store, clock=lambda: 1000.0)

    def take(self, replies: list[Reply]) -> None:
        self.waiting += [reply for reply in replies if isinstance(reply, Command)]

    def swap(self) -> None:
        data = self.controller.memory("r")
        assert data is not None
        successor = self.fresh()
        successor.least_term = self.controller.least_term + 1
        successor.adopt("r", data, self.layouts)
        self.controller = successor

    def step(self, step: int, *, only: int | None = None) -> None:
        for command in self.waiting:
            self.applied.append(command)
            for rank in range(2):
                answer = CommandResult(
                    id=command.id, run="r", attempt=0, rank=rank, verb=command.verb, step=step - 1, status="applied",
                    readback="ok",
                )  # fmt: skip
                self.take(self.controller.take(answer))
        self.waiting = []
        for rank in range(2) if only is None else [only]:
            self.take(self.controller.take(self.frame(step, rank)))

    def frame(self, step: int, rank: int) -> NodeFrame:
        dice = random.Random(1000 * step + rank)
        loss = math.nan if step % 25 == 0 else 2.0 + 0.02 * dice.random() + (2.5 if step in (70, 71, 72) else 0)
        scalars = {
            "loss": loss, "grad_norm": 1.0 + 0.1 * dice.random(), "learning_rate": 1e-3, "lr_factor": 1.0,
            "update_rms": 1e-4, "clip_limit": 2.0,
        }  # fmt: skip
        scale = [448.0 * (1.0 if step < 110 else 64.0)] * 9
        columns = make.frame("r", step, 9, rank=rank, amax=[1.0 + 0.1 * dice.random() for _ in range(9)], scale=scale)
        return NodeFrame(
            run="r", attempt=0, node=f"n{rank}", rank=rank, step=step, layout_id=1, time_unix=1000.0 + step,
            ranks=[rank], scalars=[scalars], columns=columns.columns,
        )  # fmt: skip

    def story(self) -> list[Any]:
        findings = [(f.step, f.detector, f.severity, f.cause, f.layer) for f in self.store.read("r", Finding)]
        actions = [
            (a.action, a.decided_step, a.applied_step, a.status, a.outcome) for a in self.store.read("r", ActionRecord)
        ]
        return [findings, actions, [(c.action, c.verb, c.last_step) for c in self.applied]]


def run(swaps: set[int]) -> Nodes:
    nodes = Nodes()
    for step in range(1, 160):
        if step in swaps:
            # In the middle of a step: one node's frame is in, and will be handed in again.
            nodes.step(step, only=0)
            nodes.swap()
        nodes.step(step)
    return nodes


def test_decisions_do_not_depend_on_who_decides() -> None:
    undisturbed = run(set()).story()
    assert len(undisturbed[0]) >= 7, "a test without findings would show nothing"
    assert len(undisturbed[2]) >= 3
    for seed in range(4):
        swaps = set(random.Random(seed).sample(range(2, 159), 12))
        assert run(swaps).story() == undisturbed, sorted(swaps)


def test_a_term_that_no_rank_has_seen_begins_with_each_controller() -> None:
    nodes = run({30, 60, 90})
    numbers = [(command.term, command.sequence) for command in nodes.applied]
    assert numbers == sorted(set(numbers))
    assert len({command.id for command in nodes.applied}) == len(nodes.applied)
    assert nodes.applied[-1].term > nodes.applied[0].term


def test_without_a_memory_the_story_is_another() -> None:
    """The test above would notice a memory that is not used."""
    nodes = Nodes()
    for step in range(1, 160):
        if step in (73, 80):
            nodes.controller = nodes.fresh()
            for rank in range(2):
                nodes.take(
                    nodes.controller.take(
                        make.hello("r", rank=rank, world_size=2, policy=POLICY, step=step - 1,
                                   capabilities=dict.fromkeys(ACTIONS, ""))
                    )
                )  # fmt: skip
                nodes.take(nodes.controller.take(nodes.layouts[rank]))
        nodes.step(step)
    assert nodes.story() != run(set()).story()


def test_another_version_or_garbage_is_refused() -> None:
    nodes = run(set())
    data = nodes.controller.memory("r")
    assert data is not None
    successor = nodes.fresh()
    with pytest.raises(ValueError, match="written by version"):
        successor.adopt("r", msgspec.msgpack.encode(memory.Remembered(memory.VERSION, "0.0.0", {})), [])
    for bad in (b"", b"\xc1", data[:-10], msgspec.msgpack.encode({"a": 1})):
        with pytest.raises(ValueError, match=r".+"):
            successor.adopt("r", bad, [])
    assert successor.pilot("r") is None


def test_only_classes_of_this_package_are_made() -> None:
    class Holder:
        value: object = None

    for name in ("subprocess:Popen", "fp8watch.wire:struct", "os:system", "fp8watch.errors:Nothing"):
        with pytest.raises(ValueError, match="memory does not fit"):
            memory.recall(Holder(), {"value": ["object", name, {}]})


def test_containers_keep_their_kind() -> None:
    class Holder:
        def __init__(self) -> None:
            self.a: object = {1: (2, "x"), "y": {3.5, None}}
            self.b: object = deque([1, 2], maxlen=5)
            self.c: object = Counter({"a": 3})
            self.d: object = frozenset({b"z"})
            self.e: object = len

    holder, fresh = Holder(), Holder()
    holder.a = {7: ((), [True])}
    fresh.b = fresh.c = fresh.d = None
    state = memory.decode(memory.encode(memory.remember(holder), __version__), __version__)
    memory.recall(fresh, state)
    assert fresh.a == holder.a
    assert isinstance(fresh.b, deque)
    assert fresh.b.maxlen == 5
    assert (fresh.c, fresh.d, fresh.e) == (holder.c, holder.d, len)
