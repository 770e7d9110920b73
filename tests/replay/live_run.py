"""A run of several ranks as a controller meets it, obeying commands: what goes into a store for a replay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fp8watch import columns
from fp8watch.controller import markers
from fp8watch.controller.service import RunController
from fp8watch.controller.stores.base import Store
from fp8watch.records import (
    ACTIONS,
    CheckpointRecord,
    Command,
    CommandResult,
    Evaluation,
    Goodbye,
    Hello,
    Layout,
    Reply,
    StepFrame,
    TensorColumn,
)

TENSORS = [
    TensorColumn(module=f"blocks.{i}.mlp", tensor="input", block=str(i), fp8_format="e4m3", history_len=16)
    for i in range(4)
]
POLICY = """version: 1
mode: auto
budgets: {actions_per_1000_steps: 20, rollbacks_per_24h: 4}
approval: {timeout_steps: 40, default: refuse}
rules:
  - name: broken
    when: {detector: nonfinite, severity: act, params_nonfinite: true}
    ladder: [{action: rollback, skip_to_onset: true, settle_steps: 5}, {action: halt}]
  - name: scales
    when: {detector: scale_frozen, severity: act}
    ladder: [{action: repair_scale, scope: tensor, settle_steps: 5}]
  - name: bursts
    when: {detector: grad_spike, severity: act}
    mode: approve
    ladder: [{action: tighten_clip, times_median: 2.0, settle_steps: 5, hold_steps: 40}]
"""
"""Rolls back, repairs scales, and asks a person about bursts."""
Numbers = Callable[[int, "LiveRun"], dict[str, float]]


class LiveRun:
    """`numbers(step, run)` are the scalars of a step. Every frame and message goes to the controller at once."""

    def __init__(self, store: Store, policy: str, numbers: Numbers, *, ranks: int = 2, directory: Path | None = None):
        self.store, self.policy, self.numbers, self.ranks = store, policy, numbers, ranks
        self.directory = directory
        self.now = 1_000_000.0
        self.wall = 5_000_000.0
        self.step = self.attempt = 0
        self.pid = 100
        self.is_broken = False
        self.in_force: dict[str, dict[str, Any]] = {}
        self.inbox: list[Command] = []
        self.drop: set[tuple[int, int, int]] = set()
        """(attempt, step, rank) of frames that get lost."""
        self.scale = {column.name: 448.0 / 8 for column in TENSORS}
        self.new_controller()

    def new_controller(self) -> None:
        """Another process decides now."""
        self.wall += 17.3
        self.controller = RunController(self.store, clock=self.clock, directory=self.directory)

    def clock(self) -> float:
        self.wall += 0.0137  # never what a replay has
        return self.wall

    def hello(self) -> None:
        for rank in range(self.ranks):
            self.now += 0.01
            hello = Hello(
                wire_version=1, run="r", attempt=self.attempt, rank=rank, local_rank=rank, world_size=self.ranks,
                pid=self.pid + rank, host="h", time_unix=self.now, step=self.step, policy=self.policy,
                policy_name="test", capabilities=dict.fromkeys(ACTIONS, ""), warmup_steps=10,
            )  # fmt: skip
            self.route(self.controller.receive(hello))
            layout = Layout(
                run="r", attempt=self.attempt, rank=rank, layout_id=0, columns=TENSORS,
                expected_modules=4, observed_modules=4,
            )  # fmt: skip
            self.route(self.controller.receive(layout))

    def route(self, replies: list[Reply]) -> None:
        self.inbox += [reply for reply in replies if isinstance(reply, Command)]

    def train(self, until: int, *, limit: int = 1000) -> None:
        while self.step < until and limit:
            limit -= 1
            commands, self.inbox = self.inbox, []
            for command in commands:
                self.obey(command)
            self.step += 1
            scalars = {
                "loss": 2.0 + 0.01 * np.sin(self.step), "grad_norm": 1.0 + 0.05 * np.cos(3 * self.step),
                "learning_rate": 1e-3, "lr_factor": 1.0, "update_rms": 1e-4, "tokens": 512.0, "clip_limit": 10.0,
            } | self.numbers(self.step, self)  # fmt: skip
            for rank in range(self.ranks):
                self.now += 0.05
                amax = np.full(len(TENSORS), 8.0 + 0.001 * np.sin(self.step + rank), dtype=np.float32)
                scale = np.array(list(self.scale.values()), dtype=np.float32)
                frame = StepFrame(
                    run="r", attempt=self.attempt, rank=rank, step=self.step, layout_id=0, time_unix=self.now,
                    scalars={name: float(value) for name, value in scalars.items()},
                    columns={"amax": columns.pack(amax, "f4"), "scale": columns.pack(scale, "f4")},
                )  # fmt: skip
                if (self.attempt, self.step, rank) not in self.drop:
                    self.route(self.controller.receive(frame))
            if self.step % 10 == 0 and not self.is_broken:
                self.save()
            self.route(self.controller.tick())

    def save(self) -> None:
        record = CheckpointRecord(
            run="r", attempt=self.attempt, checkpoint=f"a{self.attempt}-s{self.step}", step=self.step,
            path=f"/c/{self.step}", label="candidate", has_data_position=True, time_unix=self.now,
        )  # fmt: skip
        self.route(self.controller.receive(record))

    def obey(self, command: Command) -> None:
        at, replayed = self.step, 0
        if command.verb == "revert":
            self.in_force.pop(command.action, None)
        elif command.action == "rollback":
            at = command.params["checkpoint_step"]
            replayed, self.step, self.is_broken = self.step - at, at, False
            self.attempt += 1
        else:
            self.in_force[command.action] = command.params
        if command.action == "repair_scale":
            self.scale = {name: 448.0 / 8 for name in self.scale}
        answers = [
            CommandResult(
                id=command.id, run="r", attempt=self.attempt, rank=rank, verb=command.verb, step=at,
                status="applied", readback=readback, steps_replayed=replayed, observed={"rank": rank},
            )
            for readback in ("pending", "ok") for rank in range(self.ranks)
        ]  # fmt: skip
        for answer in answers[: self.ranks]:
            self.route(self.controller.receive(answer))
        if command.action == "rollback":
            self.hello()
        for answer in answers[self.ranks :]:
            self.route(self.controller.receive(answer))

    def restart_training(self, at: int) -> None:
        """The processes die without a word and are started again from a checkpoint."""
        for rank in range(self.ranks):
            self.route(self.controller.lost("r", rank))
        self.step, self.attempt, self.pid = at, self.attempt + 1, self.pid + 50
        self.in_force.clear()
        self.inbox.clear()
        self.hello()

    def disarm(self, on: bool) -> None:
        assert self.directory is not None
        (markers.disarm if on else markers.rearm)(self.directory, "r")
        self.controller.look()

    def evaluate(self) -> None:
        self.controller.receive(Evaluation(run="r", attempt=self.attempt, step=self.step, scores={"a": 1.0}))

    def end(self) -> None:
        for rank in range(self.ranks):
            self.route(self.controller.receive(Goodbye(run="r", rank=rank, step=self.step)))
