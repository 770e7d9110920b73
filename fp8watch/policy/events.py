"""Results of commands, entered into the policy's state: applied, failed, expired, reverted."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from fp8watch.policy.outcome import is_kept_without_effect, overlaps
from fp8watch.policy.rungs import Rung, TightenClip
from fp8watch.policy.schema import Policy, first_acting
from fp8watch.policy.state import InForce, PolicyState, Returned, Track
from fp8watch.policy.view import View


def applied(policy: Policy, state: PolicyState, view: View, action_id: str) -> PolicyState:
    """All ranks applied it and read it back: the settling window begins, and the budgets are charged."""
    tracks = state.tracks_of(action_id, "sent")
    rung = policy.rung_at(tracks[0].rule, tracks[0].rung) if tracks else None
    if rung is None:
        return state
    track = tracks[0]
    checkpoint = track.params.get("checkpoint")
    spent = state.spent.after(track.action, seen=view.seen, time_unix=view.time_unix, checkpoint=checkpoint)
    # A rollback is judged once the replay has passed the onset, not while it repeats known good steps.
    replay = max(0, int(track.params["onset_step"]) - int(track.params["checkpoint_step"])) if checkpoint else 0
    for item in tracks:
        steps = (policy.rung_at(item.rule, item.rung) or rung).settle_steps
        settled = replace(
            item,
            phase="settling",
            applied_seen=view.seen,
            block_until=view.seen + steps,
            judge_at=view.seen + replay + steps,
        )
        state = state.with_track(settled)
    state = replace(state, spent=spent)
    if not rung.revertible:
        return state
    held = InForce(
        action_id=action_id,
        action=track.action,
        rule=track.rule,
        params=track.params,
        rung=track.rung,
        trouble=track.trouble,
        layers=tuple(track.params.get("layers", ())),
        until_seen=_until(rung, view, track),
        ends_seen=_end(track, view),
        settle_steps=rung.settle_steps,
        hold_times=track.hold_times,
        hold_growth=rung.hold_growth,
        since_seen=view.seen,
        undo_above_clip_rate=rung.undo_above_clip_rate if isinstance(rung, TightenClip) else None,
    )
    # What was given back is in force again: its return is no news any more.
    returned = tuple(item for item in state.returned if not _is_again(item.held, held))
    return replace(state, in_force=(*state.in_force, held), returned=returned)


def taken_over(
    policy: Policy, *, action_id: str, action: str, rule: str, params: Mapping[str, Any],
    returned: Collection[str] = (), had_no_effect: bool = False, applied_seen: int, seen: int,
) -> InForce:  # fmt: skip
    """An action that was in force when this controller began, with what is left of its hold.

    `returned`: its layers that are not in force any more. `applied_seen`: when it was applied, in observed steps, of
    which `seen` is now. How often a hold had grown is not known any more.
    """
    known = policy.rule_named(rule)
    ladder = known.ladder if known is not None else ()
    taken = ((at, item) for at, item in enumerate(ladder) if item.action == action and item.mode != "observe")
    index, rung = next(taken, (0, None))
    held = InForce(
        action_id=action_id, action=action, rule=rule, params=params, since_seen=applied_seen,
        layers=tuple(layer for layer in params.get("layers", ()) if layer not in returned),
    )  # fmt: skip
    if rung is None:
        return held
    hold = None if rung.hold_steps is None else max(rung.settle_steps, rung.hold_steps)
    is_level = action == "hold_lr" and "to_lr" in params  # which stays, without effect, until the schedule is back
    is_unwanted = had_no_effect and is_level and not is_kept_without_effect(rung, first_acting(known, index + 1))
    if is_unwanted and hold is None:
        hold = 0
    return replace(
        held, rung=index, settle_steps=rung.settle_steps, hold_growth=rung.hold_growth, had_no_effect=is_unwanted,
        until_seen=None if hold is None else max(seen, applied_seen + hold),
        undo_above_clip_rate=rung.undo_above_clip_rate if isinstance(rung, TightenClip) else None,
    )  # fmt: skip


def _is_again(earlier: InForce, held: InForce) -> bool:
    if earlier.action != held.action:
        return False
    return earlier.trouble is None or held.trouble is None or overlaps(earlier.trouble, held.trouble)


def _until(rung: Rung, view: View, track: Track) -> int | None:
    if rung.hold_steps is None:
        return None
    return view.seen + max(rung.settle_steps, rung.hold_steps * track.hold_times)


def _end(track: Track, view: View) -> int | None:
    """`seen` at which a warm-up remedy ends by itself: after its steps, or where the stretched schedule meets its
    own."""
    params: Any = track.params
    if track.action == "rewarm":
        return view.seen + int(params["steps"])
    if track.action == "lengthen_warmup" and view.warmup_steps is not None:
        return view.seen + int((view.warmup_steps - view.step) * float(params["stretch"])) + 1
    return None


def failed(policy: Policy, state: PolicyState, action_id: str, why: str, *, was_applied: bool = False) -> PolicyState:
    """The action was not applied, or was not in force when read back: take the next rung at once.

    An action that was applied and then not found in force is undone first: ignored settings may take effect later.
    """
    tracks = state.tracks_of(action_id, "sent")
    if not tracks:
        return state
    track = tracks[0]
    rung = policy.rung_at(track.rule, track.rung)
    if was_applied and rung is not None and rung.revertible:
        layers = tuple(track.params.get("layers", ()))
        left = InForce(action_id=action_id, action=track.action, rule=track.rule, params=track.params, layers=layers)
        state = replace(state, leftovers=(*state.leftovers, left))
    for item in tracks:
        state = state.with_track(replace(item, phase="open", is_due=True, rung=item.rung + 1, why=why))
    return state


def expired(state: PolicyState, action_id: str) -> PolicyState:
    """No rank had the command in time: the same rung may be tried again if the trouble is still there."""
    for track in state.tracks_of(action_id, "sent"):
        state = state.with_track(replace(track, phase="open", is_due=False))
    return state


def reverted(state: PolicyState, view: View, action_id: str, *, ok: bool) -> PolicyState:
    """An undoing is complete (or failed, and is then not tried again)."""
    held = next((item for item in state.in_force if item.action_id == action_id), None)
    if held is None:
        return state
    others = tuple(item for item in state.in_force if item.action_id != action_id)
    left = tuple(layer for layer in held.layers if layer not in held.undoing_layers)
    if not ok:
        others = (*others, replace(held, is_undoing=False, is_trial=False, until_seen=None))
    elif held.action == "bf16_layers" and left:
        next_return = view.seen + held.settle_steps
        kept = replace(held, is_undoing=False, is_trial=False, layers=left, undoing_layers=(), until_seen=next_return)
        others = (*others, kept)
    state = replace(state, in_force=others)
    if ok and held.is_trial:
        earlier = tuple(item for item in state.returned if item.held.action_id != action_id)
        state = replace(state, returned=(*earlier[-31:], Returned(held=held, seen=view.seen)))
    for track in state.tracks_of(action_id, "undoing"):
        state = state.with_track(replace(track, phase="open"))
    return state


def rolled_back(state: PolicyState) -> PolicyState:
    """The timeline has changed: troubles of the old one are over, actions in force stay."""
    tracks = tuple(
        track if track.phase in {"sent", "settling", "done"} and track.action == "rollback"
        else replace(track, phase="done", is_due=False)
        for track in state.tracks
    )  # fmt: skip
    return replace(state, tracks=tracks)
