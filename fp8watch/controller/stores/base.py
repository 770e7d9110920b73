"""The store's seam: few methods, several engines behind it (SQLite, Redis, memory), one test suite for all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, Protocol, TypeVar

import msgspec

from fp8watch.errors import WireError
from fp8watch.records import Record, RunRecord, Stored

R = TypeVar("R", bound=Stored)


class Approval(Record, frozen=True, kw_only=True, tag="approval"):
    """A person's verdict on an action that waits."""

    run: str
    action_id: str
    verdict: Literal["approve", "refuse"]
    by: str = ""
    time_unix: float = 0.0
    signature: bytes = b""


_approval_decoder = msgspec.msgpack.Decoder(Approval)


def unpack_approval(body: bytes) -> Approval:
    """Decode a verdict, whose origin is not known yet. Raises `WireError` for whatever is none."""
    try:
        return _approval_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise WireError(str(error)) from error


class Store(Protocol):
    """Durable memory of runs. Appending is atomic a call; a reader never sees half of one."""

    def runs(self) -> list[RunRecord]:
        """All runs, oldest first."""

    def append(self, run: str, records: Iterable[Stored]) -> None:
        """Keep records of a run. RunRecord, ActionRecord and CheckpointRecord replace those of the same identity.

        Raises `OSError` or the engine's own error when it cannot; the caller counts and goes on.
        """

    def read(self, run: str, kind: type[R], first_step: int = 0, last_step: int | None = None) -> Iterator[R]:
        """Records of one kind in the order they were written, by step where they have one."""

    def approve(self, approval: Approval) -> None:
        """Keep a verdict; the newest on an action counts."""

    def approvals(self, run: str) -> list[Approval]:
        """The newest verdict on every action that has one."""

    def prune(self, run: str) -> int:
        """Apply the retention rules to a run; how many frames went."""

    def close(self) -> None:
        """Flush and let go."""
