"""A store in memory, for replay, backtests and tests: the same contract as on disk; keeping frames is optional."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from fp8watch.controller.identity import KINDS, key_of
from fp8watch.controller.stores.base import Approval, R, is_within
from fp8watch.records import DetectorState, RunRecord, StepFrame, Stored

MAX_FRAMES = 4096
"""Most frames of a run that are held when they are kept only for a restart: 64 steps of 64 ranks."""


class MemoryStore:
    """Keeps all records until closed; without `keep_frames` only frames that a restart needs. Not thread-safe."""

    def __init__(self, *, keep_frames: bool = True) -> None:
        self._records: dict[tuple[str, str], dict[str, Stored]] = defaultdict(dict)
        self._approvals: dict[tuple[str, str], Approval] = {}
        self._keep_frames = keep_frames
        self._count = 0

    def runs(self) -> list[RunRecord]:
        """All runs, oldest first."""
        found = [record for (_, kind), held in self._records.items() if kind == "run" for record in held.values()]
        return sorted((r for r in found if isinstance(r, RunRecord)), key=lambda record: record.started_unix)

    def append(self, run: str, records: Iterable[Stored]) -> None:
        """Add records; one with the key of an earlier one replaces it."""
        for record in records:
            if isinstance(record, DetectorState) and not self._keep_frames:
                self._drop_frames(run, record)
            self._count += 1
            if isinstance(record, StepFrame) and not self._keep_frames:
                held = self._records[run, KINDS[StepFrame]]
                if len(held) >= MAX_FRAMES:
                    del held[next(iter(held))]
            key = key_of(record)
            self._records[run, KINDS[type(record)]][f"#{self._count}" if key is None else key] = record

    def _drop_frames(self, run: str, state: DetectorState) -> None:
        """Drop the frames that the state has seen; a restart needs only later ones."""
        held = self._records.get((run, KINDS[StepFrame]), {})
        for key, frame in list(held.items()):
            if isinstance(frame, StepFrame) and (frame.attempt, frame.step) <= (state.attempt, state.step):
                del held[key]

    def read(self, run: str, kind: type[R], first_step: int = 0, last_step: int | None = None) -> Iterator[R]:
        """Records of one kind in the order in which they were first written."""
        for record in list(self._records.get((run, KINDS[kind]), {}).values()):
            if isinstance(record, kind) and is_within(record, first_step, last_step):
                yield record

    def approve(self, approval: Approval) -> None:
        """Add a verdict."""
        self._approvals[approval.run, approval.action_id] = approval

    def approvals(self, run: str) -> list[Approval]:
        """The newest verdict on every action that has one."""
        return [approval for (name, _), approval in self._approvals.items() if name == run]

    def prune(self, run: str) -> int:
        """Nothing is pruned in memory."""
        return 0

    def close(self) -> None:
        """Nothing to flush."""
