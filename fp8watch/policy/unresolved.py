"""Why an incident that its detectors have closed is not known to be over: the policy has not finished with it.

Used by the ledger, which calls no checkpoint good that was saved before its incident is known to be over.
"""

from __future__ import annotations

from fp8watch.policy.outcome import INSURANCE
from fp8watch.policy.schema import Policy, Rule
from fp8watch.policy.state import PolicyState, Track
from fp8watch.policy.view import View


def why_unresolved(policy: Policy, state: PolicyState, view: View, incident: str) -> str | None:
    """What speaks against it, in words that do not change from step to step; None: nothing.

    Bounded: a person's silence by the policy's timeout, a settling window by its steps, and a loss that stays high by
    the history of losses (`fp8watch.controller.history.KEEP_STEPS`), after which there is nothing to compare it with.
    An incident on which no rule acts is over when its detectors say so.
    """
    track = state.track_of(incident)
    if track is None or track.action in INSURANCE:
        return None
    action = f"{track.action} ({track.action_id})"
    if track.phase == "waiting":
        return f"a person was asked about {action}"
    if track.phase in {"sent", "undoing"}:
        return f"{action} was on its way"
    if track.phase == "settling":
        return f"{action} was being judged"
    if track.phase == "open":
        return "the next rung was due" if track.is_due else None
    has_helped = track.helped and not (track.is_final or track.is_damaged)
    return None if has_helped else _why_hurt(policy, view, track)


def _why_hurt(policy: Policy, view: View, track: Track) -> str | None:
    """The ladder has ended without success: the loss has to come back by itself, where its rule looks at the loss."""
    rule = policy.rule_named(track.rule)
    limit = _wanted_loss(rule) if rule is not None else None
    if limit is None:
        return None
    excess = view.loss_excess(track.trouble.onset_step)
    if excess is None or excess <= limit:
        return None
    return f"the loss was still more than {limit:.0%} above its level before"


def _wanted_loss(rule: Rule) -> float | None:
    """How far above its level before the onset the loss may be for the rule to be content; None: it does not look."""
    limits = [limit for rung in rule.ladder for limit in (rung.verify.loss_within, rung.if_loss_above)]
    return min((limit for limit in limits if limit is not None), default=None)
