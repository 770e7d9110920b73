"""The part of the detector pipeline that the controller uses, and how it names findings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from fp8watch.detect.base import Sample
from fp8watch.detect.incidents import Incident
from fp8watch.policy.view import Trouble, trouble_of
from fp8watch.records import Finding, Stored


class DetectorPipeline(Protocol):
    """The methods of `fp8watch.detect.pipeline.Pipeline` that are used."""

    def observe(self, sample: Sample) -> list[Finding]:
        """Process one step; returns the new findings."""

    def open_incidents(self) -> Sequence[Incident]:
        """The open incidents."""

    def reset(self, after: Literal["rollback", "resume"], step: int) -> None:
        """Continue the run from `step`."""


def prefix_after(restored: tuple[Stored, ...]) -> str:
    """Common start of the ids of findings and incidents, different from that of earlier processes of the same run.

    The term would not do: it grows with commands only, so a run that is only observed keeps it over restarts.
    """
    if not restored:
        return ""
    heads = (record.id.partition("-") for record in restored if isinstance(record, Finding))
    used = max((int(head) for head, dash, _ in heads if dash and head.isdigit()), default=0)
    return f"{used + 1}-"


def named(finding: Finding, prefix: str) -> Finding:
    """The finding under the ids that its run knows it by."""
    if not prefix:
        return finding
    return msgspec.structs.replace(finding, id=prefix + finding.id, incident=prefix + finding.incident)


def troubles(incidents: Iterable[Incident], prefix: str, newest: Mapping[str, Finding]) -> tuple[Trouble, ...]:
    """Open incidents as the policy sees them. `newest`: incident, as its run names it -> its newest finding."""
    found = []
    for incident in incidents:
        name = prefix + incident.id
        finding = newest.get(name)
        told = ("", {}) if finding is None else (finding.id, finding.evidence)
        found.append(trouble_of(incident, name=name, finding=told[0], evidence=told[1]))
    return tuple(found)
