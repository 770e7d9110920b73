"""Ranks as an agent sees them: sockets that send frames and obey commands, without a model behind them."""

from __future__ import annotations

import math
import os
import random
import secrets
import select
import socket
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fp8watch import wire
from fp8watch.columns import pack
from fp8watch.records import (
    ACTIONS,
    Command,
    CommandResult,
    Goodbye,
    Hello,
    Layout,
    LedgerUpdate,
    Message,
    Record,
    StepFrame,
    TensorColumn,
)

POLICY = """
version: 1
mode: auto
budgets: {actions_per_1000_steps: 1000}
rules:
  - name: not-finite
    when: {detector: nonfinite, severity: act}
    ladder: [RUNGS]
""".replace("RUNGS", ", ".join(["{action: checkpoint_now, settle_steps: 5}"] * 12))
WAITS = """
version: 1
mode: approve
rules:
  - name: not-finite
    when: {detector: nonfinite, severity: act}
    approval: {timeout_steps: 100000, default: refuse}
    ladder: [{action: checkpoint_now, settle_steps: 5}]
"""
NAN_EVERY = 40


class Nodes(Protocol):
    """What a job needs of a cluster."""

    on_end: list[Any]

    def socket(self, node: str) -> Path: ...


class FakeRank:
    """A rank as far as its agent can tell: sends frames, obeys commands at the next step, once each."""

    def __init__(
        self, path: Path, run: str, rank: int, world: int, policy: str = POLICY, start: str = "a start"
    ) -> None:
        self.path, self.run, self.rank, self.world, self.policy = path, run, rank, world, policy
        self.start = start
        self.step = 0
        self.applied: list[Command] = []
        self.of_other_starts: list[Command] = []
        self.ledger: list[LedgerUpdate] = []
        self.repeated = 0
        self.answers: dict[tuple[str, str], CommandResult] = {}
        self.newest = (0, 0)
        self.socket: socket.socket | None = None
        self._waiting: list[Command] = []
        self._splitter = wire.Splitter()
        self.unsent: list[Message] = []
        self.sends_seconds: list[float] = []
        self.columns = [
            TensorColumn(module=f"blocks.{i}.up", tensor="input", block=str(i), fp8_format="e4m3") for i in range(4)
        ]

    def connect(self) -> bool:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(1.0)
            connection.connect(os.fspath(self.path))
        except OSError:
            connection.close()
            return False
        self.socket, self._splitter = connection, wire.Splitter()
        return self._push(self.hello()) and self._push(self.layout())

    def hello(self) -> Hello:
        return Hello(
            wire_version=wire.WIRE_VERSION, run=self.run, attempt=0, rank=self.rank, local_rank=self.rank,
            world_size=self.world, pid=1000 + self.rank, host="h", time_unix=time.time(), step=self.step,
            policy=self.policy, policy_name="test", capabilities=dict.fromkeys(ACTIONS, ""),
            journal_term=self.newest[0], start=self.start,
        )  # fmt: skip

    def layout(self) -> Layout:
        return Layout(
            run=self.run, attempt=0, rank=self.rank, layout_id=1, columns=self.columns, expected_modules=4,
            observed_modules=4,
        )  # fmt: skip

    def train(self, nan_every: int = NAN_EVERY) -> None:
        """One step: obey what is due, send its frame. The ranks take turns in having a loss that is not finite."""
        for command in self._waiting:
            self._obey(command)
        self._waiting.clear()
        if self.socket is None:
            self.connect()
        self.step += 1
        is_bad = nan_every and self.step % nan_every == 0 and self.step // nan_every % self.world == self.rank
        loss = math.nan if is_bad else 2.0 + 0.01 * random.Random(self.step).random()
        scalars = {
            "loss": loss, "grad_norm": 1.0, "learning_rate": 1e-3, "lr_factor": 1.0, "update_rms": 1e-4,
            "clip_limit": 1.0, "tokens": 100.0, "step_seconds": 0.01, "overhead_seconds": 0.0,
        }  # fmt: skip
        amax = np.full(len(self.columns), 1.0, dtype=np.float32)
        scale = np.full(len(self.columns), 448.0, dtype=np.float32)
        frame = StepFrame(
            run=self.run, attempt=0, rank=self.rank, step=self.step, layout_id=1, time_unix=time.time(),
            scalars=scalars, columns={"amax": pack(amax, "f4"), "scale": pack(scale, "f4")},
        )  # fmt: skip
        self.send(frame)

    def send(self, message: Message) -> None:
        """Send, or keep for when the agent is back (as the transport does)."""
        self.unsent.append(message)
        if self.socket is None and not self.connect():
            return
        while self.unsent and self._push(self.unsent[0]):
            self.unsent.pop(0)

    def hear(self) -> None:
        """Take in what the agent has to say."""
        while self.socket is not None and select.select([self.socket], [], [], 0)[0]:
            try:
                data = self.socket.recv(65536)
            except OSError:
                data = b""
            if not data:
                self.close()
                return
            for body in self._splitter.feed(data):
                self._take(wire.unpack_reply(body))

    def goodbye(self) -> None:
        self.send(Goodbye(run=self.run, rank=self.rank, step=self.step))
        self.close()

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    def _take(self, reply: Record) -> None:
        if isinstance(reply, LedgerUpdate):
            self.ledger.append(reply)
        elif isinstance(reply, Command):
            known = self.answers.get((reply.id, reply.verb))
            if reply.start != self.start:
                self.of_other_starts.append(reply)
            elif known is not None:  # as the journal does: answered again, never done twice
                self.repeated += 1
                self.send(known)
            elif reply not in self._waiting:
                self._waiting.append(reply)

    def _obey(self, command: Command) -> None:
        answer = {
            "id": command.id, "run": self.run, "attempt": 0, "rank": self.rank, "verb": command.verb, "step": self.step,
            "start": command.start,
        }  # fmt: skip
        if (command.term, command.sequence) <= self.newest:
            result = CommandResult(**answer, status="vetoed", detail="older than what was begun already")  # type: ignore[arg-type]
        elif self.step > command.last_step:
            result = CommandResult(**answer, status="expired")  # type: ignore[arg-type]
        else:
            self.newest = (command.term, command.sequence)
            self.applied.append(command)
            result = CommandResult(**answer, status="applied", readback="ok")  # type: ignore[arg-type]
        self.answers[command.id, command.verb] = result
        self.send(result)

    def _push(self, message: Message) -> bool:
        assert self.socket is not None
        try:
            self.socket.sendall(wire.frame(message))
        except OSError:
            self.close()
            return False
        return True


class Job:
    """Ranks of one run over the nodes' sockets, in step."""

    def __init__(self, made: Nodes, run: str, nodes: dict[str, int], policy: str = POLICY) -> None:
        world = sum(nodes.values())
        owners = [node for node, count in nodes.items() for _ in range(count)]
        start = secrets.token_hex(16)
        self.ranks = [FakeRank(made.socket(node), run, rank, world, policy, start) for rank, node in enumerate(owners)]
        self.run = run
        made.on_end.append(self.close)

    @property
    def step(self) -> int:
        return self.ranks[0].step

    def train(self, steps: int, *, pause: float = 0.01, nan_every: int = NAN_EVERY, spread: float = 0.0) -> None:
        """Train in lockstep; a command is obeyed by all ranks at one step or waits for the last to hear of it.

        `pause`: seconds after each step; `spread`: between the frames of two ranks.
        """
        for _ in range(steps):
            for rank in self.ranks:
                rank.hear()
            self._meet()
            for rank in self.ranks:
                rank.train(nan_every)
                time.sleep(spread)
            time.sleep(pause)

    def _meet(self) -> None:
        """What all ranks have heard is begun by all; what only some have waits (the vote of the ranks)."""
        heard = [{(c.term, c.sequence) for c in rank._waiting} for rank in self.ranks]
        common = set.intersection(*heard)
        for rank in self.ranks:
            rank.held = [c for c in rank._waiting if (c.term, c.sequence) not in common]  # type: ignore[attr-defined]
            rank._waiting = [c for c in rank._waiting if (c.term, c.sequence) in common]
        for rank in self.ranks:
            held = rank.held  # type: ignore[attr-defined]
            for command in list(rank._waiting):
                rank._obey(command)
            rank._waiting = held

    def end(self) -> None:
        for rank in self.ranks:
            rank.goodbye()

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
