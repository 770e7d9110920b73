"""When a trouble comes back, its ladder continues where it stood instead of starting again.

If the same step goes wrong again after a rollback, the replay changed nothing that matters. The next rung is taken
then, never the same recovery twice.
"""

from __future__ import annotations

from dataclasses import replace

from fp8watch.policy.outcome import overlaps
from fp8watch.policy.schema import Rule
from fp8watch.policy.state import PolicyState, Track
from fp8watch.policy.view import Trouble, View

MEMORY_STEPS = 200
"""Steps after an outcome in which the same trouble counts as having come back."""
SAME_STEP = 2
"""Two onsets within this many steps of each other, before and after a rollback, are the same step."""


def new_track(state: PolicyState, view: View, rule: Rule, trouble: Trouble) -> tuple[Track, Track | None]:
    """The track of a new trouble, and the earlier track whose action it proves to have had no effect, if still open."""
    fresh = Track(trouble=trouble, rule=rule.name, attempt=view.attempt)
    if (again := _held_again(state, view, rule, fresh)) is not None:
        return again, None
    for earlier in reversed(state.tracks):
        if earlier.rule != rule.name or earlier.trouble.detector != trouble.detector or not earlier.action_id:
            continue
        if not overlaps(earlier.trouble, trouble):
            continue
        if earlier.action == "rollback" and earlier.attempt < view.attempt:
            if abs(earlier.trouble.onset_step - trouble.onset_step) > SAME_STEP:
                continue
            track = replace(fresh, rung=earlier.rung + 1, is_due=True, why=f"recurred at step {trouble.onset_step}")
            return track, earlier if earlier.phase == "settling" else None
        if earlier.phase == "done" and earlier.helped and earlier.action != "skip_update":
            since = view.seen - earlier.resolved_seen
            if since <= MEMORY_STEPS:
                why = f"came back {since} steps after {earlier.action} had helped"
                return replace(fresh, rung=earlier.rung + 1, why=why), None
    return fresh, None


def _held_again(state: PolicyState, view: View, rule: Rule, track: Track) -> Track | None:
    """The track on the rung that was given back before the trouble came, to be held longer; None: none was.

    Another rule's hold counts where its action is the first one here, too: a learning rate that is let go too early may
    be seen in the updates or in the loss.
    """
    for item in reversed(state.returned):
        held, since = item.held, view.seen - item.seen
        if since > MEMORY_STEPS or (held.trouble is not None and not overlaps(held.trouble, track.trouble)):
            continue
        first = next((at for at, rung in enumerate(rule.ladder) if rung.mode != "observe"), 0)
        rung = held.rung if held.rule == rule.name else first
        if rung < len(rule.ladder) and rule.ladder[rung].action == held.action:
            why = f"came back {since} steps after {held.action} was given back"
            return replace(track, rung=rung, hold_times=item.next_hold_times, why=why)
    return None


def taken_up_again(state: PolicyState, track: Track, rule: Rule, view: View) -> Track:
    """The track of a known trouble: open again when it is seen after its action was judged to have helped."""
    if track.phase != "done" or track.is_final or not track.helped:
        return track
    if track.trouble.last_seen_step < view.step or view.seen <= track.resolved_seen:
        return track
    if track.action == "skip_update":
        return replace(track, phase="open", helped=False)
    track = replace(track, phase="open", helped=False)
    again = _held_again(state, view, rule, track)
    return again or replace(track, rung=track.rung + 1, why=f"seen again after {track.action}")


def grown_serious(track: Track, before: Rule | None, rule: Rule, view: View) -> Track:
    """The track of a trouble that has grown, on the ladder of the rule for what it is now: a warning has become a case
    to act, or the parameters are not finite any more. A question about what it was does not keep that rule waiting."""
    if before is None or before.name == rule.name:
        return track
    is_case_to_act = before.when.severity == "warn" and rule.when.severity == "act"
    has_ended = track.phase == "done" and track.is_final and bool(track.action_id)
    has_poisoned = bool(rule.when.params_nonfinite) and not before.when.params_nonfinite
    is_free = track.phase in {"open", "waiting"}
    if (is_case_to_act and (is_free or track.phase == "done")) or (has_poisoned and (is_free or has_ended)):
        return Track(trouble=track.trouble, rule=rule.name, attempt=view.attempt)
    return track
