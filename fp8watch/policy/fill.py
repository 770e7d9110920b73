"""From a rung and a trouble to the parameters of a command, or the reason why the rung cannot be taken now."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fp8watch.policy import gain
from fp8watch.policy.lr_return import JUMP, returned_level
from fp8watch.policy.outcome import PRECISION
from fp8watch.policy.preconditions import unmet
from fp8watch.policy.rungs import (
    Bf16All,
    Bf16Layers,
    CheckpointCadence,
    Halt,
    HoldLr,
    LengthenWarmup,
    Rewarm,
    Rollback,
    Rung,
    SkipUpdate,
    TightenClip,
)
from fp8watch.policy.schema import Policy
from fp8watch.policy.state import PolicyState
from fp8watch.policy.target import choose_target
from fp8watch.policy.view import Trouble, View
from fp8watch.vocabulary import MAX_SKIP_BATCHES

Params = dict[str, Any]
RECENT_STEPS = 64
"""Troubles this recent count as the same event when the onset of a rollback is chosen."""


class NotNow(Exception):
    """This rung cannot be taken now; the message is the reason."""


def fill(policy: Policy, state: PolicyState, view: View, rung: Rung, trouble: Trouble) -> tuple[Params, str]:
    """The command's parameters, and a sentence on how they were chosen. Raises `NotNow`."""
    if (why := view.unavailable.get(rung.action)) is not None:
        raise NotNow(f"not available in this run: {why}")
    if (why := unmet(rung.requires, view, trouble)) is not None:
        raise NotNow(why)
    if isinstance(rung, Rollback):
        return _rollback(policy, state, view, rung, trouble)
    no_gain, remark = gain.judge(rung, view, trouble)
    if no_gain is not None:
        raise NotNow(no_gain)
    special = _SPECIAL.get(type(rung))
    if special is not None:
        params, how = special(state, view, rung, trouble)
        return params, how or remark
    params = rung.command_params()
    if rung.action in {"repair_scale", "bf16_layers"} or rung.scope in {"tensor", "layer"}:
        params["tensors"] = _tensors(view, rung, trouble)
    return params, remark


def _tensors(view: View, rung: Rung, trouble: Trouble) -> list[str]:
    """The tensors to act on, by the rung's scope: those named, all of the layers named, or all of the run."""
    scope = rung.scope or rung.scopes[0]
    if scope == "run":
        return list(view.tensors)
    of_layers = [name for name in view.tensors if name.rpartition(":")[0] in set(trouble.layers)]
    named = list(trouble.tensors)
    if rung.action == "repair_scale":
        # Repairing a correct scale changes nothing, so all scales that look wrong now are repaired at once.
        others = [item for item in view.troubles if item.detector in PRECISION and view.age(item) <= 1]
        named = list(dict.fromkeys([*named, *(name for item in others for name in item.tensors)]))
    covered = {name.rpartition(":")[0] for name in named}
    if scope == "tensor" and named and covered >= set(trouble.layers):
        return named
    chosen = list(dict.fromkeys([*named, *of_layers]))
    if not chosen:
        raise NotNow("the finding names no tensor and no layer")
    return chosen


def _bf16_layers(state: PolicyState, view: View, rung: Rung, trouble: Trouble) -> tuple[Params, str]:
    assert isinstance(rung, Bf16Layers)
    already = state.bf16_modules()
    layers = list(trouble.layers) or [name.rpartition(":")[0] for name in trouble.tensors]
    layers = list(dict.fromkeys(layers))
    if not layers:
        raise NotNow("the finding names no layer")
    if already is None or already >= set(layers):
        raise NotNow("these layers already run in BF16")
    new = [layer for layer in layers if layer not in already]
    limit = max(1, math.floor(rung.max_share * len(view.modules))) if view.modules else len(layers)
    if len(new) + len(already) > limit:
        count = len(new) + len(already)
        raise NotNow(f"{count} of {len(view.modules)} modules would be in BF16, over max_share {rung.max_share}")
    return {"layers": new}, ""


def _bf16_all(state: PolicyState, view: View, rung: Rung, trouble: Trouble) -> tuple[Params, str]:
    if state.bf16_modules() is None:
        raise NotNow("the whole model already runs in BF16")
    return {}, ""


def _skip_update(state: PolicyState, view: View, rung: Rung, trouble: Trouble) -> tuple[Params, str]:
    assert isinstance(rung, SkipUpdate)
    if trouble.detector != "nonfinite":
        raise NotNow("only a non-finite gradient is skipped")
    if view.params_nonfinite:
        raise NotNow("parameters are not finite: skipping an update does not mend them")
    if view.num_skipped == 0:
        raise NotNow("the update was made, not skipped")
    if view.num_skipped > rung.max_consecutive:
        raise NotNow(f"{view.num_skipped} updates in a row skipped, at most {rung.max_consecutive}")
    return {}, f"update {view.step} left out by the ranks' standing rule"


def _hold_lr(state: PolicyState, view: View, rung: Rung, trouble: Trouble) -> tuple[Params, str]:
    assert isinstance(rung, HoldLr)
    _not_twice(state, "hold_lr")
    if rung.factor is not None:
        return {"factor": rung.factor}, ""
    levels, earlier = view.lr_level(trouble.onset_step), returned_level(state, view)
    if earlier is not None and (levels is None or levels[1] > earlier * JUMP):
        # What was before the onset is no level to go back to: since our return it may have been the schedule's.
        level = earlier if levels is None else min(earlier, levels[0])
        return {"to_lr": level}, f"LR back to {level:.3g}: it was held at {earlier:.3g} until our return"
    if levels is None or levels[1] <= 0:
        return {"factor": 0.5}, "LR before the onset unknown: halved"
    before, now = levels
    if now <= before * JUMP:
        return {"factor": 0.5}, f"LR has not jumped ({before:.3g} before the onset, {now:.3g} now): halved"
    # `to_lr` keeps the level whatever the schedule does next; a factor would only fit the schedule of this step.
    return {"to_lr": before}, f"LR back from {now:.3g} to {before:.3g}, its level before onset {trouble.onset_step}"


def _tighten_clip(state: PolicyState, view: View, rung: Rung, trouble: Trouble) -> tuple[Params, str]:
    assert isinstance(rung, TightenClip)
    _not_twice(state, "tighten_clip")
    if trouble.detector == "nonfinite" or view.is_nonfinite_now:
        raise NotNow("clipping cannot mend a norm that is not finite")
    if rung.per_tensor is not None:
        return {"per_tensor": rung.per_tensor}, f"each tensor to {rung.per_tensor:g} times its own norm"
    if rung.max_norm is not None:
        return {"max_norm": rung.max_norm}, ""
    if view.grad_norm_median is None:
        raise NotNow("no gradient norm has been observed")
    limit = rung.times_median * view.grad_norm_median
    return {"max_norm": limit}, f"{rung.times_median} times the median gradient norm {view.grad_norm_median:.3g}"


def _lengthen_warmup(state: PolicyState, view: View, rung: Rung, trouble: Trouble) -> tuple[Params, str]:
    _not_twice(state, "lengthen_warmup")
    if view.is_warming_up:
        return rung.command_params(), f"step {view.step} of a warm-up whose end is not known"
    if view.warmup_steps is None:
        raise NotNow("the schedule's warm-up is not known")
    if view.step >= view.warmup_steps:
        raise NotNow(f"warm-up ended at step {view.warmup_steps}")
    return rung.command_params(), f"step {view.step} of a warm-up of {view.warmup_steps}"


def _rewarm(state: PolicyState, view: View, rung: Rung, trouble: Trouble) -> tuple[Params, str]:
    _not_twice(state, "rewarm")
    return rung.command_params(), ""


def _checkpoint_cadence(state: PolicyState, view: View, rung: Rung, trouble: Trouble) -> tuple[Params, str]:
    _not_twice(state, "checkpoint_cadence")
    return rung.command_params(), ""


def _halt(state: PolicyState, view: View, rung: Rung, trouble: Trouble) -> tuple[Params, str]:
    reason = f"{trouble.detector} ({trouble.cause}) since step {trouble.onset_step}"
    return {"reason": reason}, ""


def _not_twice(state: PolicyState, action: str) -> None:
    if any(item.action == action for item in state.in_force):
        raise NotNow("already in force")


def _rollback(policy: Policy, state: PolicyState, view: View, rung: Rollback, trouble: Trouble) -> tuple[Params, str]:
    onset = earliest_onset(state, view, trouble)
    target = choose_target(
        view.checkpoints,
        onset_step=onset,
        rung=rung,
        used=state.spent.per_checkpoint,
        per_checkpoint=policy.budgets.rollbacks_per_checkpoint,
    )
    if target.checkpoint is None:
        raise NotNow(target.reason)
    skip_batches = rung.skip_batches + (onset - target.checkpoint.step if rung.skip_to_onset else 0)
    if skip_batches > MAX_SKIP_BATCHES:
        raise NotNow(
            f"{skip_batches} batches would be left out between {target.checkpoint.checkpoint} and the onset at step "
            f"{onset}; at most {MAX_SKIP_BATCHES} may be"
        )
    params: Params = {
        "checkpoint": target.checkpoint.checkpoint,
        "checkpoint_step": target.checkpoint.step,
        "onset_step": onset,
        "margin_steps": rung.margin_steps,
        "skip_batches": skip_batches,
        "allow_without_data": rung.if_data_position_missing == "accept",
        "changes": [{"action": change.action, "params": dict(change.params)} for change in rung.changes],
    }
    kept = sorted({item.action for item in state.in_force})
    return params, target.reason + (f"; kept in force: {', '.join(kept)}" if kept else "")


def earliest_onset(state: PolicyState, view: View, trouble: Trouble) -> int:
    """The first step that may be damaged: the earliest onset of all act troubles that are recent."""
    onsets = [trouble.onset_step]
    onsets += [item.onset_step for item in view.troubles if item.severity == "act" and view.age(item) <= RECENT_STEPS]
    onsets += [
        track.trouble.onset_step
        for track in state.tracks
        if track.attempt == view.attempt
        and track.trouble.severity == "act"
        and track.action not in {"skip_update"}
        and view.age(track.trouble) <= RECENT_STEPS
    ]
    return min(onsets)


_SPECIAL: dict[type[Rung], Callable[[PolicyState, View, Rung, Trouble], tuple[Params, str]]] = {
    Bf16Layers: _bf16_layers,
    Bf16All: _bf16_all,
    SkipUpdate: _skip_update,
    HoldLr: _hold_lr,
    TightenClip: _tighten_clip,
    LengthenWarmup: _lengthen_warmup,
    Rewarm: _rewarm,
    Halt: _halt,
    CheckpointCadence: _checkpoint_cadence,
}
