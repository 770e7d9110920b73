"""Resume after a start: restores the newest good or candidate checkpoint that every rank finds intact.

With several ranks, rank 0 proposes a checkpoint. All ranks read their part of it and report whether it is intact; only
then do all of them overwrite their state. If one rank fails to, all raise.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from fp8watch.checkpoints.manager import CheckpointManager
from fp8watch.checkpoints.restore import Loaded, RestoreReport, Unfit
from fp8watch.errors import CheckpointError
from fp8watch.records import CheckpointRecord
from fp8watch.training.agreement.peers import Peers, PeersLost


class _RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's message in one round."""

    record: CheckpointRecord | None = None
    has_some: bool = False
    damaged: str = ""
    unfit: str = ""
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What was restored, and the highest attempt of any rank."""

    report: RestoreReport
    record: CheckpointRecord
    attempt: int


def resume_alone(manager: CheckpointManager, attempt: int) -> Resumed | None:
    """Resume a run of one process. None: there is no checkpoint. Raises `CheckpointError`."""
    if not manager.records():
        return None

    def newest(refused: dict[str, str]) -> CheckpointRecord:
        found = manager.resume_target()
        if found is None or found.checkpoint in refused:
            said = f"no checkpoint in {manager.root} is usable; remove them to start afresh"
            raise CheckpointError("; ".join([*refused.values(), said]))
        return found

    first = newest({})
    report = manager.restore(first.checkpoint, allow_without_data=True, following=lambda _, refused: newest(refused))
    return Resumed(report=report, record=manager.ledger.find(report.checkpoint), attempt=attempt)


def refuse_together(peers: Peers | None, reason: str, seconds: float) -> None:
    """Tell the ranks that resume that this one cannot use the checkpoints, and raise `CheckpointError`."""
    if peers is not None:
        try:
            _say(peers, _RankReport(unfit=reason), seconds)
        except PeersLost as error:
            reason = f"{reason}; {error}"
    raise CheckpointError(f"resume: {reason}")


def resume_together(manager: CheckpointManager, peers: Peers, attempt: int, seconds: float) -> Resumed | None:
    """Resume a run of several ranks. None: there is no checkpoint. Raises `CheckpointError` on all ranks."""
    try:
        return _resume_together(manager, peers, attempt, seconds)
    except PeersLost as error:
        raise CheckpointError(f"resume: {error}") from error


def _resume_together(manager: CheckpointManager, peers: Peers, attempt: int, seconds: float) -> Resumed | None:
    refused: dict[str, str] = {}
    while True:
        record = manager.resume_target() if manager.is_writer else None
        has_some = manager.is_writer and bool(manager.records())
        words = _say(peers, _RankReport(record=record, has_some=has_some), seconds)
        for rank, other in enumerate(words):
            if other.unfit:
                raise CheckpointError(f"resume: rank {rank}: {other.unfit}")
        proposal = words[0]
        if proposal.record is None:
            if proposal.has_some:
                said = f"no checkpoint in {manager.root} is usable; remove them to start afresh"
                raise CheckpointError("; ".join([*refused.values(), said]))
            return None
        target = proposal.record.checkpoint
        loaded, word = _load(manager, target)
        words = _say(peers, word, seconds)
        for rank, other in enumerate(words):
            if other.unfit:
                raise CheckpointError(f"{target} cannot be restored on rank {rank}: {other.unfit}")
        damaged = next((f"rank {rank}: {other.damaged}" for rank, other in enumerate(words) if other.damaged), None)
        if damaged is not None or loaded is None:
            refused[target] = damaged or "damaged"
            if manager.is_writer:
                manager.refuse(target, refused[target])
            continue
        report, failure = _put_back(manager, loaded, refused)
        words = _say(peers, _RankReport(damaged=failure, attempt=attempt), seconds)
        failed = next((f"rank {rank}: {other.damaged}" for rank, other in enumerate(words) if other.damaged), None)
        if failed is not None or report is None:
            raise CheckpointError(f"{target}: not all ranks could restore it, {failed}")
        return Resumed(report=report, record=proposal.record, attempt=max(other.attempt for other in words))


def _load(manager: CheckpointManager, target: str) -> tuple[Loaded | None, _RankReport]:
    try:
        return manager.load(target, allow_without_data=True), _RankReport()
    except Unfit as error:
        return None, _RankReport(unfit=str(error))
    except CheckpointError as error:
        return None, _RankReport(damaged=str(error))
    except Exception as error:  # the other ranks wait for an answer in any case
        return None, _RankReport(unfit=f"{type(error).__name__}: {error}")


def _put_back(manager: CheckpointManager, loaded: Loaded, refused: dict[str, str]) -> tuple[RestoreReport | None, str]:
    try:
        return manager.put_back(loaded, skip_batches=0, refused=refused), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _say(peers: Peers, word: _RankReport, seconds: float) -> list[_RankReport]:
    answers = peers.exchange(msgspec.json.encode(word).decode(), seconds)
    return [msgspec.json.decode(answer, type=_RankReport) for answer in answers]
