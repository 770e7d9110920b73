"""What holds an action back besides its own limits: a rung's `requires`, and the policy's quiet times."""

from __future__ import annotations

from fp8watch.policy.rungs import Requires
from fp8watch.policy.schema import Quiet
from fp8watch.policy.view import Trouble, View


def why_quiet(quiet: Quiet, view: View, trouble: Trouble) -> str | None:
    """Which quiet time holds for this trouble, in words that do not change from step to step; None: none."""
    if trouble.detector in quiet.still_acts_on:
        return None
    if quiet.in_warmup and _in_warmup(view):
        return "quiet: the schedule warms up"
    if view.since_start is not None and view.since_start <= quiet.after_start_steps > 0:
        return f"quiet: less than {quiet.after_start_steps} steps since a restart or rollback"
    if view.since_evaluation is not None and view.since_evaluation <= quiet.after_evaluation_steps > 0:
        return f"quiet: less than {quiet.after_evaluation_steps} steps since an evaluation"
    return None


def unmet(requires: Requires, view: View, trouble: Trouble) -> str | None:
    """The first precondition that does not hold now; None: all hold."""
    if requires.in_warmup is not None and requires.in_warmup != _in_warmup(view):
        return f"requires in_warmup: {str(requires.in_warmup).lower()}"
    if requires.from_step is not None and view.step < requires.from_step:
        return f"requires step {requires.from_step} or later"
    if requires.max_layers is not None and len(trouble.layers) > requires.max_layers:
        return f"{len(trouble.layers)} layers concerned, requires at most {requires.max_layers}"
    if requires.good_checkpoint is not None:
        has_one = any(
            item.label == "good" and item.path and item.step < trouble.onset_step for item in view.checkpoints
        )
        if has_one != requires.good_checkpoint:
            return f"requires {'a' if requires.good_checkpoint else 'no'} good checkpoint before the onset"
    if requires.loss_above is not None:
        excess = view.loss_excess(trouble.onset_step)
        if excess is None:
            return "requires loss_above, and the loss before the onset is unknown"
        if excess <= requires.loss_above:
            return f"loss {excess:+.1%} against before the onset, requires more than {requires.loss_above:+.1%}"
    return None


def _in_warmup(view: View) -> bool:
    return view.is_warming_up or (view.warmup_steps is not None and view.step <= view.warmup_steps)
