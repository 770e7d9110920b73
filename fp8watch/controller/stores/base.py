"""The store interface: few methods, several engines (SQLite, Redis, memory), one test suite for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from fp8watch.bounds import Start
from fp8watch.controller.identity import step_of
from fp8watch.errors import WireError
from fp8watch.records import Record, RunRecord, Stored

R = TypeVar("R", bound=Stored)


class Approval(Record, frozen=True, kw_only=True, tag="approval"):
    """A person's verdict on an action that waits for approval (`fp8watch.security.approvals` makes and checks it)."""

    run: str
    action_id: str
    verdict: Literal["approve", "refuse"]
    by: str = ""
    time_unix: float = 0.0
    start: Start = ""
    """This and what follows: the action as the person saw it. Of an earlier version, which named the id only, it is
    empty."""
    attempt: int = 0
    action: str = ""
    params: dict[str, Any] = msgspec.field(default_factory=dict)
    decided_step: int = 0
    last_step: int | None = None
    """Until when it waits (`ActionRecord.expires_step`)."""
    signature: bytes = b""


_approval_decoder = msgspec.msgpack.Decoder(Approval)


def unpack_approval(body: bytes) -> Approval:
    """Decode a verdict; its signature is not checked here. Raises `WireError` for anything else."""
    try:
        return _approval_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise WireError(str(error)) from error


def is_within(record: Stored, first_step: int, last_step: int | None) -> bool:
    """Whether a record is within the step limits of `Store.read`; one without a step always is."""
    step = step_of(record)
    return step is None or (first_step <= step and (last_step is None or step <= last_step))


class Store(Protocol):
    """Durable records of runs. Each `append` is atomic: a reader never sees half of one."""

    def runs(self) -> list[RunRecord]:
        """All runs, oldest first."""

    def append(self, run: str, records: Iterable[Stored]) -> None:
        """Add records of a run. A record with the identity of an earlier one replaces it (`identity.key_of`).

        Raises `OSError` or the engine's own error on failure; the caller counts it and continues.
        """

    def read(self, run: str, kind: type[R], first_step: int = 0, last_step: int | None = None) -> Iterator[R]:
        """Records of one kind in the order in which they were first written. The step limits (inclusive) apply to
        records that have a step."""

    def approve(self, approval: Approval) -> None:
        """Add a verdict. The newest one on an action counts."""

    def approvals(self, run: str) -> list[Approval]:
        """The newest verdict on every action that has one."""

    def prune(self, run: str) -> int:
        """Apply the retention rules to a run. Returns the number of frames removed."""

    def close(self) -> None:
        """Flush and close."""
