"""All actions, by name."""

from __future__ import annotations

from fp8watch.actions.adjust_loss_scale import AdjustLossScale
from fp8watch.actions.base import Action
from fp8watch.actions.bf16_all import Bf16All
from fp8watch.actions.bf16_layers import Bf16Layers
from fp8watch.actions.checkpoint_actions import CheckpointCadence, CheckpointNow
from fp8watch.actions.context import ActionContext
from fp8watch.actions.halt import Halt
from fp8watch.actions.hold_lr import HoldLr
from fp8watch.actions.lengthen_warmup import LengthenWarmup
from fp8watch.actions.raise_margin import RaiseMargin
from fp8watch.actions.recheck import Recheck
from fp8watch.actions.repair_scale import RepairScale
from fp8watch.actions.rewarm import Rewarm
from fp8watch.actions.rollback import Rollback
from fp8watch.actions.skip_update import SkipUpdate
from fp8watch.actions.tighten_clip import TightenClip


def build_actions(context: ActionContext) -> dict[str, Action]:
    """The actions of one training process: one for each name in `fp8watch.records.ACTIONS`."""
    table: dict[str, Action] = {}
    actions: list[Action] = [
        LengthenWarmup(context),
        Rewarm(context),
        HoldLr(context),
        TightenClip(context),
        SkipUpdate(context),
        AdjustLossScale(context),
        RaiseMargin(context),
        RepairScale(context),
        Bf16Layers(context),
        Bf16All(context),
        CheckpointNow(context),
        CheckpointCadence(context),
        Recheck(context),
        Rollback(context, lambda: table),
        Halt(context),
    ]
    table.update((action.name, action) for action in actions)
    return table


def capabilities(actions: dict[str, Action]) -> dict[str, str]:
    """Action -> the reason why it cannot be done, empty if it can (`Hello.capabilities`)."""
    return {name: action.unavailable() or "" for name, action in actions.items()}
