"""Brings the ranks of a run together at attach: whether they act, under which policy, and from which attempt on.

Every rank writes a note to the job's store and reads the notes of all others. As all read the same notes, all come to
the same result. If a rank does not attach within a limit, the run is only observed.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

import fp8watch
from fp8watch.checkpoints.bit_sums import LATEST, WEIGHTED
from fp8watch.checkpoints.manifest import FORMAT_VERSION
from fp8watch.identity import Identity
from fp8watch.settings import Settings
from fp8watch.training.agreement.all_ranks import AllRanks
from fp8watch.training.agreement.base import Agreement, ObserveOnly, SingleProcess
from fp8watch.training.agreement.gloo import GlooTransport, TwoLevels, shorten
from fp8watch.training.agreement.groups import ALONE, RankGroups
from fp8watch.training.agreement.peers import Peers
from fp8watch.training.agreement.start import NotNamed, Start
from fp8watch.training.agreement.transport import Transport

logger = logging.getLogger(__name__)

TWO_LEVELS_ABOVE = 64
"""Largest number of ranks in one group. Larger runs on several nodes use `TwoLevels`."""

_c10d: Any = dist
"""The parts of torch without type hints."""

STALE = (
    "the job's store still holds entries of an earlier start, so a rank may read the answer of a rank that is gone: "
    "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun restarts ranks"
)
THIS_VERSION = f"{fp8watch.__version__} with checkpoints of format {FORMAT_VERSION}"
_meetings = itertools.count()
"""Counts the attaches of this process. All ranks must attach equally often to find each other."""


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank tells the others at attach."""

    rank: int
    host: str
    run: str
    attempt: int
    """The attempt that the rank would begin. The highest of all ranks is used."""
    acts: bool
    """False: the rank's policy only observes."""
    policy: str
    """Digest of all that must be the same on every rank."""
    modules: str = ""
    """Digest of the names of the rank's FP8 modules."""
    start: str = ""
    """The rank's proposal for the name of this start. Rank 0's is used."""
    version: str = ""
    """Its fp8watch; empty: one that does not say."""
    checksums: str = WEIGHTED
    """The latest checksum algorithm that it knows (`fp8watch.checkpoints.bit_sums`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The agreement of this run, and the attempt that all its ranks begin."""

    agreement: Agreement
    attempt: int
    peers: Peers | None = None
    """Exchange between ranks outside of step boundaries; None: there is one rank, or no store."""
    elsewhere: tuple[str, ...] = ()
    """FP8 modules that other ranks hold and this one does not (pipeline stages, experts)."""
    start: str = ""
    """Name of this start, the same on all ranks and never used before (`Hello.start`); empty: the ranks do not act
    together. Commands carry it, so that none is carried out in a later start."""
    remark: str = ""
    """What to say to the user on this rank."""


def new_start() -> str:
    """A new name for a start, never used before."""
    return secrets.token_hex(16)


def policy_digest(*parts: object) -> str:
    """Hash of what has to be the same on every rank, so that standing rules take effect on all of them alike."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def join(
    identity: Identity,
    settings: Settings,
    *,
    attempt: int,
    acts: bool,
    policy: str,
    modules: Sequence[str] = (),
    groups: RankGroups = ALONE,
) -> Joined:
    """The agreement for this run. With several ranks and a policy that acts, waits for the other ranks.

    `attempt`: the attempt that this rank would begin. `modules`: names of this rank's FP8 modules. Raises nothing: if
    the ranks do not meet, the agreement is `ObserveOnly` with the reason.
    """
    if identity.world_size == 1:
        return Joined(agreement=SingleProcess(), attempt=attempt, start=new_start())
    meeting = f"fp8watch/{next(_meetings)}"
    start: Start | None = None
    note = Note(
        rank=identity.rank, host=identity.host, run=identity.run, attempt=attempt, acts=acts,
        # With the version, because a rank that knows of none must not wait for us to vote.
        policy=policy_digest(policy, groups.stages, THIS_VERSION), modules=policy_digest(*modules), start=new_start(),
        version=THIS_VERSION, checksums=LATEST,
    )  # fmt: skip
    peers: Peers | None = None
    try:
        store = _store(meeting)
        if _may_be_restarted():
            start = Start(store, identity.rank, identity.world_size)
            start.announce(acts=acts)
            peers = Peers(store, identity.rank, identity.world_size, start)
            if not acts:
                return Joined(agreement=ObserveOnly(None), attempt=attempt, peers=peers)
            store = _c10d.PrefixStore(start.name(settings.join_seconds, heeds_observers=True), store)
        if _is_known(store, f"note/{identity.rank}"):
            logger.warning("fp8watch: %s", STALE)
        peers = Peers(store, identity.rank, identity.world_size)
        if acts:  # before the note, because ranks that have read the note read this too
            store.set(f"modules/{note.modules}", msgspec.json.encode(list(modules)).decode())
        store.set(f"note/{identity.rank}", msgspec.json.encode(note).decode())
        if not acts:
            return Joined(agreement=ObserveOnly(None), attempt=attempt, peers=peers)
        notes = _notes(store, identity.world_size, settings.join_seconds)
        elsewhere = _elsewhere(store, notes, modules)
    except (_NotTogether, NotNamed) as error:
        return Joined(agreement=ObserveOnly(str(error) if acts else None), attempt=attempt, peers=peers)
    except Exception as error:  # what a store raises differs by kind and version of torch
        logger.debug("ranks did not meet", exc_info=error)
        reason = f"several ranks: they did not find each other ({shorten(error)})"
        return Joined(agreement=ObserveOnly(reason), attempt=attempt, peers=peers)
    attempt = max(other.attempt for other in notes)
    peers.algorithm = LATEST if all(other.checksums == LATEST for other in notes) else WEIGHTED
    apart = why_not(notes, has_agents=settings.agent is not None)
    if apart is not None:
        remark = remark_on_versions(notes, identity.rank)
        return Joined(agreement=ObserveOnly(apart), attempt=attempt, peers=peers, remark=remark)
    try:
        seconds = settings.agreement_seconds
        votes = transport(store, "votes", notes, identity.rank, seconds=seconds)
        verdicts = transport(store, "verdicts", notes, identity.rank, seconds=seconds)
    except Exception as error:
        reason = f"several ranks: no group could be made ({shorten(error)})"
        return Joined(agreement=ObserveOnly(reason), attempt=attempt, peers=peers)
    agreement = AllRanks(identity.rank, votes, verdicts, wait_seconds=seconds, stages=groups.stages)
    return Joined(agreement=agreement, attempt=attempt, peers=peers, elsewhere=elsewhere, start=notes[0].start)


def why_not(notes: Sequence[Note], *, has_agents: bool) -> str | None:
    """Why ranks with these notes cannot act together; None: they can."""
    observer = next((note for note in notes if not note.acts), None)
    if observer is not None:
        return f"several ranks: the policy of rank {observer.rank} only observes"
    if (versions := different_versions(notes)) is not None:
        return f"several ranks: {versions}"
    if len({note.policy for note in notes}) > 1:
        return "several ranks: they were given different policies"
    if len({note.run for note in notes}) > 1:
        return "several ranks: they have different run names; set FP8WATCH_RUN to one name on all"
    if len({note.host for note in notes}) > 1 and not has_agents:
        return "several nodes: each needs an agent that takes commands from one controller (FP8WATCH_AGENT)"
    return None


def different_versions(notes: Sequence[Note]) -> str | None:
    """Which versions of fp8watch the ranks run; None: all run the same one."""
    firsts: dict[str, int] = {}
    for note in notes:
        firsts.setdefault(note.version or "an earlier one", note.rank)
    if len(firsts) == 1:
        return None
    said = ", ".join(f"{version} on rank {rank}" for version, rank in firsts.items())
    return f"they run different versions of fp8watch ({said})"


def remark_on_versions(notes: Sequence[Note], rank: int) -> str:
    """What this rank says of different versions: on rank 0, and on the first rank of another version than that."""
    versions = different_versions(notes)
    other = next((note.rank for note in notes if note.version != notes[0].version), None)
    if versions is None or rank not in (0, other):
        return ""
    return f"the ranks cannot act together: {versions}; no action is taken, the run is only observed"


def transport(
    store: Any, name: str, notes: Sequence[Note], rank: int, *, seconds: float, flat_up_to: int = TWO_LEVELS_ABOVE
) -> Transport:
    """One group for all ranks; with more than `flat_up_to` ranks on several nodes, a group per node and one of leaders.

    A collective call. Raises `RuntimeError` when a rank does not take part within `seconds`.
    """
    hosts: dict[str, list[int]] = {}
    for note in notes:
        hosts.setdefault(note.host, []).append(note.rank)
    if len(notes) <= flat_up_to or len(hosts) == 1:
        return GlooTransport(_c10d.PrefixStore(name, store), rank, len(notes), seconds=seconds)
    node = next(index for index, ranks in enumerate(hosts.values()) if rank in ranks)
    local_ranks = list(hosts.values())[node]
    local = GlooTransport(
        _c10d.PrefixStore(f"{name}/node-{node}", store), local_ranks.index(rank), len(local_ranks), seconds=seconds
    )
    leaders = None
    if rank == local_ranks[0]:
        leaders = GlooTransport(_c10d.PrefixStore(f"{name}/leaders", store), node, len(hosts), seconds=seconds)
    return TwoLevels(local, leaders, seconds=seconds)


def _elsewhere(store: Any, notes: Sequence[Note], modules: Sequence[str]) -> tuple[str, ...]:
    """FP8 modules that only other ranks hold. Each distinct list is read once. Raises what a store raises."""
    found: dict[str, None] = {}
    for digest in dict.fromkeys(note.modules for note in notes if note.acts):
        found |= dict.fromkeys(msgspec.json.decode(store.get(f"modules/{digest}"), type=list[str]))
    return tuple(name for name in found if name not in set(modules))


class _NotTogether(Exception):
    pass


def _is_known(store: Any, key: str) -> bool:
    """Whether `key` is set; False also when the store cannot be asked."""
    try:
        return bool(store.check([key]))
    except Exception as error:
        logger.debug("the store cannot be asked for %s", key, exc_info=error)
        return False


def _may_be_restarted() -> bool:
    """Whether torchrun runs the ranks. It may restart them with the same store, so each start needs a name. Its restart
    count cannot serve as one: it counts a node's own failures, not starts. All ranks get the same answer."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _store(meeting: str) -> Any:
    """The job's default store with the prefix `meeting`. Raises `_NotTogether` when there is none."""
    if not dist.is_available() or not dist.is_initialized():
        raise _NotTogether("several ranks: torch.distributed is not initialised, so they cannot agree")
    found = getattr(dist.distributed_c10d, "_get_default_store", None)
    if found is None or not hasattr(dist, "ProcessGroupGloo"):
        raise _NotTogether("several ranks: this torch gives no access to its store, or has no gloo")
    return _c10d.PrefixStore(meeting, found())


def _notes(store: Any, ranks: int, seconds: float) -> list[Note]:
    keys = [f"note/{rank}" for rank in range(ranks)]
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except Exception as error:
        raise _NotTogether(f"several ranks: not all of them attached within {seconds:g} s") from error
    return [msgspec.json.decode(store.get(key), type=Note) for key in keys]
