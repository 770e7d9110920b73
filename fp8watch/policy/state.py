"""What the policy remembers between decisions: how far each ladder has been climbed, and which actions are in force."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fp8watch.policy.budgets import Spent
from fp8watch.policy.rungs import Rung
from fp8watch.policy.view import Trouble
from fp8watch.records import Mode, Outcome

Phase = Literal["open", "waiting", "sent", "settling", "undoing", "done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """One trouble on its rule's ladder."""

    trouble: Trouble
    rule: str
    attempt: int
    rung: int = 0
    """Index of the current rung, or of the next one to try."""
    phase: Phase = "open"
    is_due: bool = False
    """The next rung is taken even if the trouble is not seen in this very step."""
    is_final: bool = False
    """Finished and never taken up again: proposed, refused, or at the end of the ladder."""
    action_id: str = ""
    action: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    decided_seen: int = 0
    applied_seen: int = 0
    block_until: int = 0
    """`seen` until which nothing else is done."""
    judge_at: int = 0
    """`seen` at which the outcome is judged."""
    resolved_seen: int = 0
    helped: bool = False
    is_damaged: bool = False
    """It has helped, and no rung was left for what the trouble has done to the loss."""
    why: str = ""
    """Why it is above the first rung."""
    hold_times: int = 1
    """Factor of the hold: that of the hold which a failed trial return ended, grown; else 1."""
    asked_for: str = ""
    """The incident for which its action was asked about, where another's question covers this one; empty: its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """A change that is in force in the ranks."""

    action_id: str
    action: str
    rule: str
    params: Mapping[str, Any]
    rung: int = 0
    """Index of its rung on the ladder of `rule`."""
    trouble: Trouble | None = None
    """What it was taken for; None: not known any more (a leftover, or the controller was restarted)."""
    layers: tuple[str, ...] = ()
    until_seen: int | None = None
    """`seen` at which a return is tried; None: never."""
    ends_seen: int | None = None
    """`seen` at which it ends by itself (such as a finished `rewarm`); None: it does not."""
    settle_steps: int = 20
    hold_times: int = 1
    hold_growth: int = 2
    since_seen: int = 0
    undo_above_clip_rate: float | None = None
    is_undoing: bool = False
    is_trial: bool = False
    """Whether it is being undone because its hold is over, and not for lack of effect."""
    is_deferred: bool = False
    """Whether it was written down that its return has to wait for the schedule."""
    had_no_effect: bool = False
    """Whether it waits for the schedule only, to be undone for lack of effect."""
    undoing_layers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """A hold, or a part of one, that a trial return ended. It is kept apart from the tracks: the ladder may have gone
    on while the change was in force."""

    held: InForce
    seen: int
    """`seen` at which it was given back."""

    @property
    def next_hold_times(self) -> int:
        """Factor of the next hold, if the trouble comes back."""
        return self.held.hold_times * self.held.hold_growth


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """The whole state. Immutable: every decision makes a new one."""

    tracks: tuple[Track, ...] = ()
    in_force: tuple[InForce, ...] = ()
    returned: tuple[Returned, ...] = ()
    """Trial returns, oldest first, without those whose trouble has come back and is answered again."""
    leftovers: tuple[InForce, ...] = ()
    """Actions to undo as soon as no other command is on its way: applied but not as asked when read back (half of a
    change may still be there), or without effect."""
    spent: Spent = field(default_factory=Spent)
    next_number: int = 1
    notes: Mapping[str, str] = field(default_factory=dict)
    """Incident -> why nothing is done about it, as last recorded."""

    def track_of(self, incident: str) -> Track | None:
        """The track of an incident."""
        return next((track for track in self.tracks if track.trouble.incident == incident), None)

    def tracks_of(self, action_id: str, phase: Phase) -> list[Track]:
        """The tracks that share an action and are in this phase, the one that it was decided for first."""
        found = [track for track in self.tracks if track.action_id == action_id and track.phase == phase]
        return sorted(found, key=lambda track: bool(track.asked_for))

    def with_track(self, track: Track) -> PolicyState:
        """The state with this track, which replaces any other of the same incident."""
        others = tuple(item for item in self.tracks if item.trouble.incident != track.trouble.incident)
        return replace(self, tracks=(*others[-255:], track))

    def with_held(self, held: InForce) -> PolicyState:
        """The state with what is known now of an action in force, in its place."""
        return replace(
            self, in_force=tuple(held if item.action_id == held.action_id else item for item in self.in_force)
        )  # fmt: skip

    def bf16_modules(self) -> frozenset[str] | None:
        """Modules that our actions keep in BF16; None: all modules."""
        if any(item.action == "bf16_all" for item in self.in_force):
            return None
        return frozenset(layer for item in self.in_force if item.action == "bf16_layers" for layer in item.layers)


def without_waiting(state: PolicyState) -> PolicyState:
    """The state without actions that wait for a person: nobody is asked any more."""
    tracks = tuple(
        replace(track, phase="done", is_final=True) if track.phase == "waiting" else track for track in state.tracks
    )
    return replace(state, tracks=tracks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One thing decided in a step. At most one decision of a step (`apply` or `revert`) becomes a command."""

    kind: Literal["apply", "propose", "wait", "join", "record", "verdict", "revert", "note"]
    """`join`: another incident shares the action of a question that waits, or the answer to it. `note`: why nothing is
    done about a trouble; for the decision log only."""
    action_id: str
    action: str
    params: Mapping[str, Any] = field(default_factory=dict)
    rule: str = ""
    trouble: Trouble | None = None
    mode: Mode = "observe"
    reason: str = ""
    status: Literal["unavailable", "refused", "expired"] | None = None
    """For `record`: what became of the action, without a command."""
    outcome: Outcome = "pending"
    """For `verdict`."""
    rung: Rung | None = None
    by: str = ""
    """The person who decided it."""
    considered: str = ""
    """Why the rules before this one do not match the trouble."""
    expires_step: int | None = None
    """For `wait`: the step at which the policy's default replaces the person's answer."""
