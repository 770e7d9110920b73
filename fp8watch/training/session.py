"""The state of one attached process: step, attempt, and the parts that `Watch` and the boundary share."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

import fp8watch
from fp8watch import wire
from fp8watch.actions.base import Action
from fp8watch.actions.context import ActionContext
from fp8watch.controller import markers
from fp8watch.errors import CheckpointError
from fp8watch.identity import Identity
from fp8watch.records import ACTIONS, CheckpointRecord, Hello, LedgerUpdate
from fp8watch.training.agreement.base import Agreement
from fp8watch.training.agreement.groups import ALONE, RankGroups
from fp8watch.training.agreement.peers import Peers
from fp8watch.training.data import Batches
from fp8watch.training.disarm import Disarm
from fp8watch.training.evidence import Evidence
from fp8watch.training.guard import Guard
from fp8watch.training.journal import Journal
from fp8watch.training.recorder import Recorder
from fp8watch.training.stepping import OptimizerTap
from fp8watch.training.uplink import Uplink

logger = logging.getLogger(__name__)


SAVE_SECONDS = 10.0
"""What `detach` may wait for a checkpoint that is still being written, here or by another rank."""


class Session:
    """Everything that lives from attach to detach."""

    recorder: Recorder
    context: ActionContext
    uplink: Uplink
    tap: OptimizerTap

    def __init__(
        self,
        *,
        identity: Identity,
        directory: Path,
        guard: Guard,
        journal: Journal,
        agreement: Agreement,
        attempt: int,
        start: str = "",
        peers: Peers | None = None,
        agreement_seconds: float = 600.0,
        disarm: Disarm,
        policy_text: str | None,
        policy_name: str,
        framework: str,
        groups: RankGroups = ALONE,
    ) -> None:
        self.identity = identity
        self._directory = directory
        self.guard = guard
        self.journal = journal
        self.agreement = agreement
        self.peers = peers
        self.agreement_seconds = agreement_seconds
        self.disarm = disarm
        self.evidence = Evidence(identity.rank, identity.world_size)
        self.actions: Mapping[str, Action] = {}
        self.step = 0
        self.attempt = attempt
        self.start = start
        """Name of this start (`Hello.start`)."""
        self._policy_text, self._policy_name = policy_text, policy_name
        self._framework = framework
        self._groups = groups
        self._warmup_told: tuple[int | None, bool] = (None, False)
        self._said: set[str] = set()
        self._was_rewound = False
        self._num_dropped = 0
        self.stop_reason: str | None = None
        """Why this rank must not make another optimizer step; the watch raises `RanksApart` with it."""
        self.is_mixed = False
        """Whether a restore has failed half-way, so that the state must be neither trained on nor saved."""
        self.cannot_resume = ""
        """Why the checkpoints that attach was given cannot be used, although there may be some."""
        self.on_detach: Callable[[], None] = lambda: None
        self._begin_attempt()

    def note(self, text: str) -> None:
        """Say something to the person who trains, once."""
        if text not in self._said:
            self._said.add(text)
            logger.warning("fp8watch: %s", text)

    def capabilities(self) -> Mapping[str, str]:
        """Action -> empty when it is available, else why it is not."""
        nobody = self.agreement.unavailable or self.journal.unavailable or self.boundary_off
        found = {}
        for name in ACTIONS:
            action = self.actions.get(name)
            if nobody is not None:
                found[name] = nobody
            elif action is None:
                found[name] = "not in this version"
            else:
                try:
                    found[name] = action.unavailable() or ""
                except Exception as error:
                    self.guard.failed(name, error)
                    found[name] = f"{type(error).__name__}: {error}"
        return found

    @property
    def boundary_off(self) -> str | None:
        """Why no command is carried out any more after failures; None: commands are."""
        error = self.guard.disabled.get("boundary")
        return None if error is None else f"commands are not carried out any more ({error})"

    def hello(self) -> Hello:
        """Who we are, now."""
        identity, layout = self.identity, self.recorder.layout
        warmup = self._warmup_told = self._warmup()
        model = self.context.model
        versions = {
            "python": platform.python_version(), "torch": str(torch.__version__), "fp8watch": fp8watch.__version__,
            "fp8": self._framework, "device": str(next((p.device for p in model.parameters()), "none")),
        }  # fmt: skip
        if layout.columns:
            versions["recipe"] = layout.columns[0].recipe
        return Hello(
            wire_version=wire.WIRE_VERSION, run=identity.run, attempt=self.attempt, rank=identity.rank,
            local_rank=identity.local_rank, world_size=identity.world_size, pid=identity.pid, host=identity.host,
            time_unix=time.time(), step=self.step, policy=self._policy_text, policy_name=self._policy_name,
            capabilities=dict(self.capabilities()), warmup_steps=warmup[0], is_warming_up=warmup[1],
            num_parameters=sum(p.numel() for p in model.parameters()), framework=versions,
            expected_modules=layout.expected_modules, observed_modules=layout.observed_modules,
            journal_term=self.journal.term, armed=self.disarm.reason() is None,
            tensor_group=list(self._groups.tensor), start=self.start,
        )  # fmt: skip

    def _warmup(self) -> tuple[int | None, bool]:
        """Length of the scheduler's warm-up where it is known, and whether one is under way whose end is not."""
        action = self.actions.get("lengthen_warmup")
        return getattr(action, "warmup_steps", None), bool(getattr(action, "is_warming_up", False))

    def checkpoint_records(self) -> list[CheckpointRecord]:
        """The ledger's records, for the first messages on a connection; told by the rank that writes it."""
        manager = self.context.checkpoints
        return manager.records() if manager is not None and manager.is_writer else []

    def send_frames(self, *, wait: bool = False) -> None:
        """Send the layout if it is new, then every frame that has arrived."""
        if self.context.lr.seen is not None and self._warmup() != self._warmup_told:
            self._introduce()
        layout = self.recorder.layout
        self.uplink.announce(layout)
        for frame in self.recorder.poll(wait=wait):
            self.evidence.note(frame, layout)
            self.uplink.send(frame)
        dropped = self.recorder.dropped
        if dropped > self._num_dropped:
            self.uplink.count_dropped("ring_full", dropped - self._num_dropped)
            self._num_dropped = dropped

    def rewind(self, step: int) -> None:
        """A rollback has restored the state after `step` updates: count on from there, as a new attempt."""
        self.guard.call("frames", self.send_frames, wait=True)
        self.step = step
        self.attempt += 1
        self._was_rewound = True
        self._begin_attempt()
        self.guard.call("capture", self.recorder.forget)
        self.guard.call("transport", self._introduce)

    def resumed(self, step: int, record: CheckpointRecord, attempt: int) -> None:
        """A checkpoint of an earlier process was restored before the first step. `attempt`: the highest that any rank
        has begun."""
        self.step = step
        # The step counter jumps: an attempt of its own, also where attach has begun a new one already.
        self.attempt = 1 + max(self.attempt, attempt, record.attempt if record.run == self.identity.run else 0)
        self._begin_attempt()
        self.recorder.forget()
        self._introduce()

    def set_data(self, batches: Batches) -> None:
        """The loop has asked for its batches: a data position can be saved and restored from now on."""
        self.context.parts.data = batches
        if batches.unavailable is not None:
            self.note(f"data position: {batches.unavailable}")
        self.guard.call("transport", self._introduce)

    def _introduce(self) -> None:
        self.recorder.observed.refresh(self.attempt)
        self.uplink.introduce(self.hello(), self.recorder.layout)

    def _begin_attempt(self) -> None:
        if self.journal.unavailable is None:
            try:
                self.journal.attempt(self.attempt)
            except OSError as error:
                self.journal.unavailable = f"journal cannot be written: {error}"

    def maybe_save(self) -> None:
        """Save a checkpoint if one is due after this step; not right after the restore of one, nor of a state that must
        not be trained on."""
        was_rewound, self._was_rewound = self._was_rewound, False
        manager = self.context.checkpoints
        if manager is None or self.is_mixed or self.stop_reason is not None:
            return
        self._try_checkpoints(manager.poll)
        if not was_rewound and self._try_checkpoints(lambda: manager.maybe_save(self.step)) is not None:
            self.recorder.restart_clock()

    def _try_checkpoints(self, work: Callable[[], CheckpointRecord | None]) -> CheckpointRecord | None:
        try:
            return work()
        except CheckpointError as error:
            self.guard.failures["checkpoints"] = self.guard.failures.get("checkpoints", 0) + 1
            self.note(str(error))
            return None

    def label(self, update: LedgerUpdate) -> None:
        """Take in the controller's verdict on a checkpoint; it also knows those that rotation has removed since. A
        verdict for another start may be about another checkpoint of that name."""
        manager = self.context.checkpoints
        if self.start and update.start != self.start:
            if not update.start:
                self.note("verdicts on checkpoints are ignored: upgrade the controller and its agent to this version")
            return
        if (
            manager is not None
            and manager.is_writer
            and any(record.checkpoint == update.checkpoint for record in manager.records())
        ):
            manager.label(update.checkpoint, update.label, update.reason)

    def stop(self, reason: str) -> None:
        """Other ranks may be in another state: make no further optimizer step."""
        self.stop_reason = self.stop_reason or reason

    def agreement_over(self, reason: str) -> None:
        """Ranks agree on nothing any more in this attempt: say so, here and to the controller."""
        self.note(
            f"{reason}; training goes on and is watched, without actions; a restart of all ranks brings them back"
        )
        self.guard.call("transport", self._introduce)

    def mark_halted(self, reason: str) -> None:
        """Keep attach from starting this run again until a person releases it; durable on return."""
        markers.write_halted(
            self._directory, self.identity.run, reason=reason, step=self.step, time_unix=time.time()
        )  # fmt: skip

    def finish_saving(self) -> None:
        """Wait, within limits, for the checkpoints that are still being written."""
        if self.context.checkpoints is not None:
            self.context.checkpoints.close(SAVE_SECONDS)

    def detach(self) -> None:
        """Take every hook off."""
        self.tap.detach()
        self.recorder.detach()
        self.agreement.close()
        self.on_detach()
