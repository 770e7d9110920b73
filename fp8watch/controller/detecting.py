"""What the controller uses of the detectors, and how it names what they find."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from fp8watch.detect.base import Sample
from fp8watch.detect.incidents import Incident
from fp8watch.records import Finding, Stored


class Detecting(Protocol):
    """What is used of `fp8watch.detect.pipeline.Pipeline`."""

    def observe(self, sample: Sample) -> list[Finding]:
        """Take a step in; what is new."""

    def open_incidents(self) -> Sequence[Incident]:
        """What is under way."""

    def reset(self, after: Literal["rollback", "resume"], step: int) -> None:
        """The run goes on from `step`."""


def prefix_after(restored: tuple[Stored, ...]) -> str:
    """What ids of findings and incidents begin with: earlier processes of the same run have used theirs already.

    Not the term, which grows with commands only: a run that is observed has the same one after each restart.
    """
    if not restored:
        return ""
    heads = (record.id.partition("-") for record in restored if isinstance(record, Finding))
    used = max((int(head) for head, dash, _ in heads if dash and head.isdigit()), default=0)
    return f"{used + 1}-"
