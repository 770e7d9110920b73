"""Whether an action helped, judged at the end of its settling window, and which troubles it covers while in force."""

from __future__ import annotations

from fp8watch.policy.match import first_match
from fp8watch.policy.rungs import Rung, Verify
from fp8watch.policy.schema import Policy
from fp8watch.policy.state import PolicyState, Track
from fp8watch.policy.view import Trouble, View

HARM = frozenset({"loss_spike", "divergence", "nonfinite", "update_rms", "stuck"})
"""What clipping is meant to prevent. The norm before clipping keeps spiking, so its own detector cannot judge it."""
PRECISION = frozenset({"scale_frozen", "saturation", "underflow", "amax_jump", "amax_drift", "crest", "shadow_error"})
"""Detectors of FP8 tensors: irrelevant for a module that runs in BF16."""


INSURANCE = frozenset({"checkpoint_now", "checkpoint_cadence"})
"""Actions that repair nothing and are not judged by the trouble: they only have to be in force."""

BUILDS_ON = frozenset({"rollback", "bf16_all", "halt"})
"""Before these actions the previous rung is not undone: a rollback, for one, keeps what is in force."""


def is_kept_without_effect(rung: Rung | None, following: Rung | None) -> bool:
    """Whether a rung that had no effect stays in force. `following`: the next one that acts."""
    is_built_on = following is not None and following.action in BUILDS_ON
    return is_built_on or (rung is not None and not rung.undo_without_effect)


def why_not_recovered(policy: Policy, view: View, track: Track, rung: Rung | None) -> str | None:
    """Why the run has not recovered; None: it has.

    It has when no act trouble of the same rule and layers was seen in the last share of the window (its second half,
    unless the rung says otherwise) and the loss is back where the rung wants it.
    """
    if track.action in INSURANCE:
        return None
    verify = rung.verify if rung is not None else Verify()
    quiet = max(1.0, (track.judge_at - track.applied_seen) * verify.quiet_share)
    recent = [item for item in view.troubles if item.severity == "act" and view.age(item) < quiet]
    if track.action == "tighten_clip":
        is_there = any(item.detector in HARM for item in recent)
    else:
        is_there = any(_same_rule(policy, view, track, item) and overlaps(track.trouble, item) for item in recent)
    if is_there:
        return "still there at the end of the settling window"
    if verify.loss_within is not None:
        excess = view.loss_excess(track.trouble.onset_step)
        if excess is not None and excess > verify.loss_within:
            return f"loss still {excess:.1%} above its level before onset {track.trouble.onset_step}"
    return None


def is_for_damage(view: View, rung: Rung, trouble: Trouble) -> bool:
    """Whether a rung is for as much damage to the loss as is left, although the trouble itself is over."""
    excess = view.loss_excess(trouble.onset_step)
    return rung.if_loss_above is not None and excess is not None and excess > rung.if_loss_above


def _same_rule(policy: Policy, view: View, track: Track, trouble: Trouble) -> bool:
    if trouble.incident == track.trouble.incident:
        return True
    match = first_match(policy, trouble, view)
    return match is not None and match[1].name == track.rule


def overlaps(first: Trouble, second: Trouble) -> bool:
    """Whether two troubles concern the same place; one without layers concerns the whole run."""
    return not first.layers or not second.layers or bool(set(first.layers) & set(second.layers))


def is_covered(state: PolicyState, trouble: Trouble) -> bool:
    """Whether an action in force already answers the trouble: clipping answers spikes, BF16 any trouble of FP8
    tensors."""
    if trouble.detector == "grad_spike" and any(item.action == "tighten_clip" for item in state.in_force):
        return True
    if trouble.detector not in PRECISION:
        return False
    modules = state.bf16_modules()
    return modules is None or (bool(trouble.layers) and set(trouble.layers) <= modules)
