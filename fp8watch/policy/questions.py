"""When two incidents ask a person the same question: the same action, as strong, at the same place, for the same rank.

Numbers that are computed from the evidence of the moment (a level of the learning rate, a clip limit from the median)
may differ: what is approved is what was shown. What the rungs say about judging, holding and preconditions is each
ladder's own and may differ too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8watch.policy.rungs import Rollback, Rung, TightenClip
from fp8watch.policy.schema import Policy
from fp8watch.policy.state import PolicyState, Track
from fp8watch.policy.view import Trouble

_OF_ROLLBACK = ("checkpoint", "skip_batches", "allow_without_data", "changes")
"""Its onset and margin only say how the checkpoint was chosen."""


def asked_already(
    policy: Policy, state: PolicyState, rung: Rung, params: Mapping[str, Any], trouble: Trouble
) -> Track | None:
    """The track of another incident whose question, not answered yet, is the one that this rung would ask."""
    wanted = (rung.action, trouble.rank, _what(rung, params))
    for track in state.tracks:
        if track.phase != "waiting" or track.asked_for or track.trouble.incident == trouble.incident:
            continue
        other = policy.rung_at(track.rule, track.rung)
        if other is not None and (other.action, track.trouble.rank, _what(other, track.params)) == wanted:
            return track
    return None


def _what(rung: Rung, params: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(rung, Rollback):
        return {name: params.get(name) for name in _OF_ROLLBACK}
    what = rung.command_params()
    if isinstance(rung, TightenClip) and not what:
        what["times_median"] = rung.times_median
    return what | {name: sorted(params[name]) for name in ("tensors", "layers") if name in params}
