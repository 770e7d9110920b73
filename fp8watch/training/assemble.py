"""Builds the parts of a watch. `optimizer.step` is wrapped last, so that an error before that leaves it unchanged."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fp8watch.actions.clip_control import ClipControl
from fp8watch.actions.context import ActionContext
from fp8watch.actions.lr_control import LrControl
from fp8watch.actions.registry import build_actions
from fp8watch.actions.skip_guard import SkipGuard
from fp8watch.actions.stages import SharedNorm, Stages
from fp8watch.capture import sources
from fp8watch.capture.closer import CloserOptions
from fp8watch.capture.gradients import has_scaler as has_scaler_in_use
from fp8watch.checkpoints import Checkpoints
from fp8watch.checkpoints.manager import CheckpointManager
from fp8watch.checkpoints.parts import TrainingParts
from fp8watch.checkpoints.place import Unsupported
from fp8watch.controller import markers
from fp8watch.errors import CheckpointError, Halted, RanksApart
from fp8watch.identity import Identity, identify
from fp8watch.policy.schema import Policy, skip_limits
from fp8watch.records import Command
from fp8watch.security import Verifier, load_ring
from fp8watch.settings import Settings
from fp8watch.training import report
from fp8watch.training.agreement.all_ranks import AllRanks
from fp8watch.training.agreement.base import MustStop
from fp8watch.training.agreement.groups import ALONE, RankGroups
from fp8watch.training.agreement.join import Joined, join, policy_digest
from fp8watch.training.boundary import Boundary
from fp8watch.training.data import Batches
from fp8watch.training.disarm import Disarm
from fp8watch.training.guard import Guard
from fp8watch.training.journal import Journal
from fp8watch.training.recorder import Recorder
from fp8watch.training.session import Session
from fp8watch.training.stepping import OptimizerTap
from fp8watch.training.uplink import Uplink
from fp8watch.training.watch import Watch
from fp8watch.transport import places
from fp8watch.transport.channel import Channel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of attach, checked."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: Any | None
    dataloader: Any | None
    checkpoints: Checkpoints | None
    scaler: Any | None
    run: str | None
    settings: Settings
    forward: Callable[[], torch.Tensor] | None
    policy: Policy
    policy_text: str | None
    policy_name: str
    arms_skip_update: bool
    also: Mapping[str, Any] = field(default_factory=dict)
    groups: RankGroups = ALONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """An attached watch, its session, and the lines of attach's report."""

    watch: Watch
    session: Session
    report: list[str]


def assemble(arguments: Arguments) -> Assembled:
    """Build a watch and attach it.

    Raises `BadInput` for an invalid agent address or key, and `Halted` for a run that was halted and not released; in
    both cases nothing has been started.
    """
    settings = arguments.settings
    identity = identify(arguments.run, settings.run)
    verifier = Verifier(load_ring(settings, "command"))
    _refuse_halted(settings, identity)
    channel = Channel(run=identity.run, settings=settings, local_rank=identity.local_rank)
    folder = places.run_folder(settings.dir, identity.run)
    guard = Guard()
    found = guard.call("sources", sources.find, arguments.model) or sources.Found()
    journal = Journal(folder, identity.rank)
    joined = _join(arguments, identity, journal, _modules(guard, found))
    session = Session(
        identity=identity, directory=settings.dir, guard=guard, journal=journal, agreement=joined.agreement,
        attempt=joined.attempt, start=joined.start, peers=joined.peers, agreement_seconds=settings.agreement_seconds,
        disarm=Disarm(settings, identity.run), policy_text=arguments.policy_text,
        policy_name=arguments.policy_name, framework=found.framework, groups=arguments.groups,
    )  # fmt: skip
    if joined.remark:
        session.note(joined.remark)
    if session.journal.unavailable is not None:
        session.note(f"{session.journal.unavailable}; training goes on, nothing can act")
    session.context = _context(arguments, identity, session, found)
    session.context.elsewhere = joined.elsewhere
    session.actions = guard.call("actions", build_actions, session.context) or {}
    _arm_skip(arguments, session)
    session.recorder = _recorder(arguments, identity, session, found)
    session.uplink = Uplink(channel, guard, session.checkpoint_records, verifier)
    if session.context.checkpoints is not None:
        session.context.checkpoints.on_change = session.uplink.send
    boundary = _boundary(arguments, identity, session)
    session.uplink.open(session.hello(), session.recorder.layout)
    session.tap = OptimizerTap(arguments.optimizer, session.recorder)
    boundary.report_unfinished(identity.run, session.attempt)
    if isinstance(session.agreement, AllRanks):
        session.agreement.on_over = session.agreement_over
    text = report.lines(
        identity=identity, layout=session.recorder.layout, framework=found.framework,
        policy_name=arguments.policy_name, mode=arguments.policy.mode, capabilities=session.capabilities(),
        directory=folder, agent=settings.agent, disarmed=session.disarm.reason(),
    )  # fmt: skip
    return Assembled(watch=Watch(session, boundary), session=session, report=text)


def _refuse_halted(settings: Settings, identity: Identity) -> None:
    """Raise `Halted` for a run that was halted and not released. It is logged first, because Python prints nothing of a
    `SystemExit` with a number."""
    run = identity.run
    if not markers.is_halted(settings.dir, run):
        return
    why = markers.why_halted(settings.dir, run)
    halted = f"run {run} was halted before" + (f" ({why})" if why else "")
    logger.error("fp8watch: %s; nothing is trained. To start it again: fp8watch runs release %s", halted, run)
    raise Halted(f"{halted}; let it go on with: fp8watch runs release {run}")


def _modules(guard: Guard, found: sources.Found) -> tuple[str, ...]:
    """Names of the FP8 modules that actions can change."""
    return () if found.controls is None else tuple(guard.call("modules", found.controls.modules) or ())


def _join(arguments: Arguments, identity: Identity, journal: Journal, modules: tuple[str, ...]) -> Joined:
    """Meet the other ranks. The digest covers what standing rules depend on, which has to be the same on all ranks."""
    has_scaler = has_scaler_in_use(arguments.scaler)
    saves = arguments.checkpoints
    cadence = None if saves is None else (saves.every, saves.format, saves.background)
    return join(
        identity, arguments.settings, attempt=journal.last_attempt + 1, acts=arguments.policy.mode != "observe",
        policy=policy_digest(arguments.policy_text, arguments.policy_name, has_scaler, cadence),
        modules=modules, groups=arguments.groups,
    )  # fmt: skip


def _context(arguments: Arguments, identity: Identity, session: Session, found: sources.Found) -> ActionContext:
    data = Batches(arguments.dataloader) if arguments.dataloader is not None else None
    parts = TrainingParts(
        model=arguments.model, optimizer=arguments.optimizer, scheduler=arguments.lr_scheduler,
        scaler=arguments.scaler, controls=found.controls, data=data, also=arguments.also,
    )  # fmt: skip
    manager = None
    if arguments.checkpoints is not None:
        try:
            manager = CheckpointManager(
                arguments.checkpoints, parts, run=identity.run, attempt=lambda: session.attempt,
                rank=identity.rank, world_size=identity.world_size, together=session.peers,
            )  # fmt: skip
        except (CheckpointError, OSError) as error:
            session.note(f"no checkpoints will be saved: {error}")
            session.cannot_resume = "" if isinstance(error, Unsupported) else str(error)
            if session.peers is not None:
                session.peers.decline(str(error))
        for text in [] if manager is None else manager.notes:
            session.note(text)
    groups = arguments.groups
    clip = ClipControl(arguments.optimizer, None if groups.pipeline is None else Stages(group=groups.pipeline))
    skip = SkipGuard(arguments.optimizer, clip, arguments.scaler)
    if isinstance(session.agreement, AllRanks):
        skip.ask_peers = _ask_peers(session, session.agreement)
        if groups.pipeline is not None:
            clip.share_norm = _share_norm(session, session.agreement, groups.stage)
    return ActionContext(
        parts=parts, lr=LrControl(arguments.optimizer, arguments.lr_scheduler), clip=clip, skip=skip,
        checkpoints=manager,
        step=lambda: session.step, attempt=lambda: session.attempt, rewind=session.rewind, note=session.note,
        forward=arguments.forward,
    )  # fmt: skip


def _ask_peers(session: Session, agreement: AllRanks) -> Callable[[bool, bool], bool]:
    def ask(is_bad: bool, may_act: bool) -> bool:
        with _stopping(session):
            return agreement.any_bad(is_bad, may_act=may_act)

    return ask


def _share_norm(session: Session, agreement: AllRanks, stage: int) -> SharedNorm:
    def share(norm: float) -> list[float] | None:
        with _stopping(session):
            return agreement.stage_norms(stage, norm)

    return share


@contextlib.contextmanager
def _stopping(session: Session) -> Iterator[None]:
    """Turn `MustStop` into `RanksApart`, which ends the process: inside an optimizer step there is no boundary to stop
    at."""
    try:
        yield
    except MustStop as error:
        logger.error(
            "fp8watch: step %d: this rank stops before its next step (exit code 85; restart all ranks): %s",
            session.step,
            error,
        )
        raise RanksApart(str(error)) from error


def _arm_skip(arguments: Arguments, session: Session) -> None:
    """Enable the policy's standing rule that skips non-finite updates without a command."""
    if not arguments.arms_skip_update or session.agreement.unavailable is not None:
        return
    skip = session.context.skip
    reason = skip.unavailable()
    if reason is not None:
        session.note(f"skip_update: {reason}")
        return
    skip.max_in_a_row = min(skip_limits(arguments.policy))
    skip.arm("policy")


def _objection(session: Session, command: Command) -> str | None:
    """Why this rank's own evidence speaks against a command; None: it does not. An error is a veto too, because drastic
    actions need this check."""
    try:
        return session.evidence.objection(command)
    except Exception as error:
        return f"this rank cannot judge it: {type(error).__name__}: {error}"


def _recorder(arguments: Arguments, identity: Identity, session: Session, found: sources.Found) -> Recorder:
    return Recorder(
        run=identity.run, rank=identity.rank, model=arguments.model, optimizer=arguments.optimizer,
        scaler=arguments.scaler, lr=session.context.lr, clip=session.context.clip, skip=session.context.skip,
        sources=found.sources, unseen=found.unseen, guard=session.guard, note=session.note,
        may_act=lambda: session.disarm.reason() is None, statistics_every=arguments.settings.statistics_every,
        closer=_closer_options(arguments.settings),
        modules=_modules(session.guard, found),
    )  # fmt: skip


def _closer_options(settings: Settings) -> CloserOptions:
    return CloserOptions(
        statistics_every=settings.statistics_every, what_if_every=settings.what_if_every,
        shadow_every=settings.shadow_every, overhead_budget=settings.overhead_budget,
    )  # fmt: skip


def _boundary(arguments: Arguments, identity: Identity, session: Session) -> Boundary:
    def broken(reason: str) -> None:
        session.is_mixed = True
        session.context.halt_reason = session.context.halt_reason or reason

    return Boundary(
        rank=identity.rank, actions=session.actions, capabilities=session.capabilities, journal=session.journal,
        agreement=session.agreement, disarm=session.disarm, mode=arguments.policy.mode, send=session.uplink.send,
        attempt=lambda: session.attempt, start=session.start, on_broken=broken, on_stop=session.stop,
        objection=lambda command: _objection(session, command),
    )  # fmt: skip
