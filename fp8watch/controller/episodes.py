"""Incidents as the ledger sees them: from the onset until it is known that they are over.

The detectors close an incident after some steps without a symptom and forget it. To the ledger it is over once they
have and the policy has nothing open about it either: no question, no action that is being judged, no rung that is due
(`fp8watch.policy.unresolved`). Steps, onsets and checkpoints are those of one timeline. After a rollback or restart the
incidents of the abandoned one lie ahead: they count until the run has passed them without an alarm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fp8watch.detect.incidents import CLOSE_AFTER
from fp8watch.detect.pipeline import QUIET_STEPS
from fp8watch.policy.outcome import INSURANCE
from fp8watch.policy.view import Trouble
from fp8watch.records import ActionRecord, Finding, Stored

PROOF_STEPS = QUIET_STEPS + CLOSE_AFTER
"""Steps without an alarm that stand for a verdict where there can be none: the time in which baseline rules say nothing
after a restart, and that in which detectors keep an incident open."""
KEPT = 64
"""Number of incidents that are over and still known, for checkpoints that are announced late."""

MOST = 256
"""Most incidents that are taken over from a store, the latest in steps."""

Why = Callable[[str], str | None]
"""Incident -> why it is not known to be over although the detectors have closed it; None: it is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One act incident."""

    incident: str
    detector: str
    onset_step: int
    is_ahead: bool = False
    """It was seen at this step before a rollback or restart, and not since. It leaves no trace if it stays away."""
    least_step: int = 0
    """Not over before this step, whatever is seen."""
    over_step: int | None = None
    """Step at which it was known to be over; None: it is not yet."""
    why: str = "its detectors still saw it"
    """What spoke against its being over, last."""

    def touches(self, step: int, healthy_steps: int) -> bool:
        """Whether a checkpoint of this step was saved inside it, or has it within its healthy steps."""
        return self.onset_step <= step + healthy_steps and (self.over_step is None or step <= self.over_step)


class Episodes:
    """The act incidents of one run's timeline."""

    def __init__(self) -> None:
        self._current: dict[str, Episode] = {}
        self._over: deque[Episode] = deque(maxlen=KEPT)

    def __iter__(self) -> Iterator[Episode]:
        yield from self._current.values()
        yield from self._over

    @property
    def has_current(self) -> bool:
        """Whether one is not known to be over."""
        return bool(self._current)

    def of(self, incidents: Iterable[str]) -> list[Episode]:
        """Those of these incidents that are not known to be over."""
        return [self._current[name] for name in incidents if name in self._current]

    def add(self, episodes: Iterable[Episode]) -> None:
        """Add what an earlier process knew."""
        self._current |= {episode.incident: episode for episode in episodes}

    def passed(self, step: int, serious: Iterable[Trouble], why: Why) -> None:
        """A step has passed, with these act troubles open after it."""
        seen = {item.incident: item for item in serious}
        for name, item in seen.items():
            if name not in self._current or self._current[name].least_step:
                self._current[name] = Episode(incident=name, detector=item.detector, onset_step=item.onset_step)
        for name, episode in list(self._current.items()):
            if name in seen or step < episode.least_step:
                continue
            if (reason := why(name)) is not None:
                self._current[name] = replace(episode, why=reason)
                continue
            del self._current[name]
            if not episode.is_ahead:
                self._over.append(replace(episode, over_step=step))

    def restarted(self, step: int) -> None:
        """The run goes on after `step`, in another timeline."""
        known = [*self._over, *self._current.values()]
        self._over.clear()
        self._current.clear()
        for episode in known:
            is_ahead = episode.onset_step > step or (episode.is_ahead and episode.onset_step + PROOF_STEPS > step)
            if is_ahead:
                self._current[episode.incident] = _ahead(episode, step)
            elif not episode.is_ahead and (episode.over_step is None or step <= episode.over_step):
                self._current[episode.incident] = _reopened(episode, step)
            elif not episode.is_ahead:
                self._over.append(episode)

    def went_on_inside(self, name: str, onset_step: int, step: int) -> None:
        """The run goes on from a state of which no more is known than that it was saved inside an incident."""
        episode = Episode(incident=name, detector="an incident", onset_step=onset_step)
        self._current.setdefault(name, _reopened(episode, step))


def _ahead(episode: Episode, step: int) -> Episode:
    return replace(
        episode, is_ahead=True, least_step=max(episode.onset_step, step) + PROOF_STEPS, over_step=None,
        why="it was seen there before the run went back",
    )  # fmt: skip


def _reopened(episode: Episode, step: int) -> Episode:
    return replace(
        episode, least_step=step + PROOF_STEPS, over_step=None, why="the run went on from inside it"
    )  # fmt: skip


def remembered(
    restored: Sequence[Stored], *, step: int, attempt: int, is_same_process: bool, has_detectors: bool
) -> list[Episode]:
    """What the store says of incidents that may not be over, for a fresh controller of a run that is at `step`.

    Of this attempt: those with an action that nobody will judge any more, and all where what the detectors knew is lost
    (those that they still have open come from them). Of earlier attempts: those that lie ahead, or not long behind.
    """
    findings = [record for record in restored if isinstance(record, Finding) and record.severity == "act"]
    acted = _unjudged([record for record in restored if isinstance(record, ActionRecord)], step)
    found = []
    for finding in findings:
        name = finding.incident or finding.id
        episode = Episode(
            incident=name, detector=finding.detector, onset_step=finding.onset_step, least_step=step + PROOF_STEPS
        )  # fmt: skip
        if finding.attempt < attempt or not is_same_process:
            if finding.onset_step + PROOF_STEPS > step:
                found.append(_ahead(episode, 0))
        elif name in acted or not has_detectors:
            found.append(replace(episode, why=acted.get(name, "what its detectors knew was lost")))
    return sorted(found, key=lambda episode: episode.onset_step)[-MOST:]


def _unjudged(actions: Iterable[ActionRecord], step: int) -> dict[str, str]:
    """Incident -> what was open about it when the last controller ended, if that is not long ago."""
    newest = {name: action for action in actions if action.action not in INSURANCE for name in action.incidents}
    found = {}
    for incident, action in newest.items():
        is_open = action.status in {"waiting", "sent"}
        is_done = action.status in {"applied", "reverted", "failed", "vetoed"}
        is_recent = max(action.decided_step, action.applied_step or 0, action.settle_until or 0) + PROOF_STEPS > step
        if is_open or (is_done and is_recent and action.outcome in {"pending", "no_effect"}):
            found[incident] = f"{action.action} ({action.id}) was not judged"
    return found
