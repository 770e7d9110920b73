"""A run in a box: a rank that trains by a script and obeys commands, and detectors that say what a script says.

What the controller does to the rank changes what the script sees, so that a remedy that does nothing is found out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from fp8watch.controller.service import RunController
from fp8watch.controller.stores.memory import MemoryStore
from fp8watch.detect.base import Sample
from fp8watch.detect.incidents import Incident
from fp8watch.records import (
    ACTIONS,
    ActionRecord,
    CheckpointRecord,
    Command,
    CommandResult,
    Finding,
    Hello,
    Layout,
    LedgerUpdate,
    Reply,
    StepFrame,
    TensorColumn,
)

CLOSE_AFTER = 20
Signal = tuple[str, str, tuple[str, ...]]
"""(detector, cause, layers), severity act."""


@dataclass
class Rank:
    """A training process: its step, what is in force in it, and its checkpoints."""

    run: str = "r"
    step: int = 0
    attempt: int = 0
    in_force: dict[str, dict[str, Any]] = field(default_factory=dict)
    applied: list[tuple[int, Command]] = field(default_factory=list)
    updates: list[LedgerUpdate] = field(default_factory=list)
    is_broken: bool = False
    """Parameters hold NaN."""
    holds: dict[str, list[str]] = field(default_factory=dict)
    """Command id -> layers it holds in BF16."""
    halted: bool = False
    unread: tuple[str, ...] = ()
    """Actions whose read-back fails."""
    start: str = ""
    """Empty: of a version that did not name its starts."""


class ScriptedPipeline:
    """Detectors that see what `script(sample)` says, with the hysteresis of the real ones."""

    def __init__(self, script: Callable[[Sample], Iterable[Signal]], onsets: dict[str, int] | None = None) -> None:
        self.script = script
        self.onsets = onsets or {}
        self.quiet_steps: list[int] = []
        self._open: dict[str, Incident] = {}
        self._count = 0

    def observe(self, sample: Sample) -> list[Finding]:
        if sample.is_quiet:
            self.quiet_steps.append(sample.step)
        found = []
        seen = set()
        for detector, cause, layers in self.script(sample):
            seen.add(detector)
            incident = self._open.get(detector)
            if incident is not None:
                incident.last_seen_step, incident.silent_samples = sample.step, 0
                continue
            self._count += 1
            onset = self.onsets.get(detector, sample.step)
            incident = Incident(
                id=f"i{self._count}", detector=detector, severity="act", cause=cause, attempt=sample.attempt,
                onset_step=onset, first_step=sample.step, last_seen_step=sample.step, layers=list(layers),
            )  # fmt: skip
            self._open[detector] = incident
            finding = Finding(
                id=f"f{self._count}", run="r", attempt=sample.attempt, step=sample.step, onset_step=onset,
                detector=detector, severity="act", cause=cause, layers=list(layers), incident=incident.id,
            )  # fmt: skip
            found.append(finding)
        for detector in list(self._open):
            if detector not in seen:
                self._open[detector].silent_samples += 1
                if self._open[detector].silent_samples > CLOSE_AFTER:
                    del self._open[detector]
        return found

    def open_incidents(self) -> list[Incident]:
        return list(self._open.values())

    def reset(self, after: str, step: int) -> None:
        self._open.clear()


class Box:
    """Drives a rank and its controller; `numbers(step, rank)` are the scalars of a step."""

    def __init__(
        self,
        policy: str,
        *,
        numbers: Callable[[int, Rank], dict[str, float]],
        script: Callable[[Sample], Iterable[Signal]] | None = None,
        onsets: dict[str, int] | None = None,
        capabilities: dict[str, str] | None = None,
        checkpoint_steps: Iterable[int] = (),
        warmup_steps: int | None = None,
        layers: Iterable[str] = (),
        store: Any = None,
        lag: int = 1,
        security: dict[str, Any] | None = None,
        start: str = "",
    ) -> None:
        self.rank = Rank(start=start)
        self.now = 1000.0
        self.store = MemoryStore() if store is None else store
        self.pipeline = ScriptedPipeline(script, onsets) if script is not None else None
        extra: dict[str, Any] = {} if self.pipeline is None else {"make_pipeline": lambda run: self.pipeline}
        self.controller = RunController(self.store, clock=lambda: self.now, **extra, **(security or {}))
        self._numbers = numbers
        self._checkpoint_steps = set(checkpoint_steps)
        self._saved: set[str] = set()
        self._lag = lag
        self._inbox: list[tuple[int, Command]] = []
        self._clock = 0
        self._policy = policy
        self._capabilities = {name: "" for name in ACTIONS} | (capabilities or {})
        self._warmup_steps = warmup_steps
        self._layers = list(layers)
        self._hello()

    def _hello(self) -> None:
        hello = Hello(
            wire_version=1, run="r", attempt=self.rank.attempt, rank=0, local_rank=0, world_size=1, pid=1, host="h",
            time_unix=self.now, step=self.rank.step, policy=self._policy, policy_name="test",
            capabilities=self._capabilities, warmup_steps=self._warmup_steps, start=self.rank.start,
        )  # fmt: skip
        self._route(self.controller.receive(hello))
        columns = [TensorColumn(module=layer, tensor="input", block=layer, fp8_format="E4M3") for layer in self._layers]
        layout = Layout(
            run="r", attempt=self.rank.attempt, rank=0, layout_id=0, columns=columns, expected_modules=len(columns),
            observed_modules=len(columns),
        )  # fmt: skip
        self._route(self.controller.receive(layout))

    def _route(self, replies: list[Reply]) -> None:
        for reply in replies:
            if isinstance(reply, Command):
                self._inbox.append((self._clock + self._lag, reply))
            elif isinstance(reply, LedgerUpdate):
                self.rank.updates.append(reply)

    def _obey(self, command: Command) -> None:
        rank = self.rank
        answer = {"id": command.id, "run": "r", "rank": 0, "verb": command.verb, "start": command.start}
        if rank.step > command.last_step:
            result = CommandResult(**answer, attempt=rank.attempt, step=rank.step, status="expired")
            self._route(self.controller.receive(result))
            return
        rank.applied.append((rank.step, command))
        at, replayed = rank.step, 0
        if command.action == "bf16_layers":
            self._hold(command)
        elif command.verb == "revert":
            rank.in_force.pop(command.action, None)
        elif command.action == "rollback":
            at = command.params["checkpoint_step"]
            replayed = rank.step - at
            rank.step, rank.attempt, rank.is_broken = at, rank.attempt + 1, False
            for change in command.params["changes"]:
                rank.in_force[change["action"]] = change["params"]
        elif command.action == "halt":
            rank.halted = True
        elif command.action != "repair_scale":
            rank.in_force[command.action] = command.params
        is_read = command.action not in rank.unread
        first = CommandResult(**answer, attempt=rank.attempt, step=at, status="applied", steps_replayed=replayed)
        self._route(self.controller.receive(first))
        if command.action == "rollback":
            self._hello()
        second = CommandResult(
            **answer, attempt=rank.attempt, step=at, status="applied", readback="ok" if is_read else "failed",
            steps_replayed=replayed,
        )  # fmt: skip
        self._route(self.controller.receive(second))

    def _hold(self, command: Command) -> None:
        """A module stays in BF16 until no command holds it any more."""
        holds = self.rank.holds
        if command.verb == "apply":
            holds[command.id] = list(command.params["layers"])
        elif "of" in command.params:
            held = holds[command.params["of"]]
            holds[command.params["of"]] = [layer for layer in held if layer not in command.params["layers"]]
        else:
            del holds[command.id]
        layers = [layer for held in holds.values() for layer in held]
        self.rank.in_force.pop("bf16_layers", None)
        if layers:
            self.rank.in_force["bf16_layers"] = {"layers": layers}

    def run(self, until: int, *, limit: int = 2000) -> None:
        """Train until a step is reached, or `limit` steps are spent, or the run is halted."""
        for _ in range(limit):
            if self.rank.step >= until or self.rank.halted:
                return
            self._clock += 1
            self.now += 0.1
            due = [command for at, command in self._inbox if at <= self._clock]
            self._inbox = [(at, command) for at, command in self._inbox if at > self._clock]
            for command in due:
                self._obey(command)
            if self.rank.halted:
                return
            rank = self.rank
            rank.step += 1
            scalars = {"loss": 2.0, "grad_norm": 1.0, "learning_rate": 1e-3, "lr_factor": 1.0, "update_rms": 1e-4}
            scalars |= self._numbers(rank.step, rank)
            frame = StepFrame(
                run="r", attempt=rank.attempt, rank=0, step=rank.step, layout_id=0, time_unix=self.now, scalars=scalars
            )
            self._route(self.controller.receive(frame))
            if rank.step in self._checkpoint_steps:
                record = CheckpointRecord(
                    run="r", attempt=rank.attempt, checkpoint=f"a{rank.attempt}-s{rank.step}", step=rank.step,
                    path=f"/c/{rank.step}", label="candidate", has_data_position=True,
                )  # fmt: skip
                self._route(self.controller.receive(record))
            self._route(self.controller.tick())

    def actions(self, name: str | None = None) -> list[ActionRecord]:
        """The action log, of one action or all."""
        records = list(self.store.read("r", ActionRecord))
        return [record for record in records if name is None or record.action == name]

    def commanded(self) -> list[tuple[int, str, str]]:
        """(step, verb, action) of what the rank was made to do."""
        return [(step, command.verb, command.action) for step, command in self.rank.applied]
