"""One model per action: which parameters a rung of the ladder may have, their units, bounds and defaults.

A rung is what the policy file says. `fp8watch.policy.fill` makes the parameters that are sent to the ranks from it and
from the evidence; where both have a key it means the same.
Zero and absent differ: an absent `hold_steps` means "for good", `hold_steps: 0` means "return at once".
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from fp8watch.records import Mode
from fp8watch.vocabulary import MAX_SKIP_BATCHES

Scope = Literal["tensor", "layer", "run"]
Steps = Annotated[int, Field(ge=0, le=10_000_000)]
Count = Annotated[int, Field(ge=1, le=10_000_000)]


class Strict(BaseModel):
    """Frozen, no unknown keys, no coercion ("3" is not 3, true is not 1), no NaN or infinity."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Requires(Strict):
    """Preconditions of a rung, besides those of the action itself. All given ones must hold, else the next rung is
    taken."""

    in_warmup: bool | None = None
    """Whether the schedule's warm-up is under way (`true` never holds where that is unknown)."""
    from_step: Steps | None = None
    """Not before this optimizer step."""
    max_layers: Count | None = None
    """At most this many layers are affected: more is not a local fault."""
    good_checkpoint: bool | None = None
    """Whether a checkpoint from before the onset is known to be good."""
    loss_above: Annotated[float, Field(ge=0.0)] | None = None
    """The loss (median of 5 steps) is more than this share above its level before the onset."""


class Verify(Strict):
    """When a rung counts as having helped, at the end of its settling window."""

    quiet_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """The trouble was not seen in this last share of the window: 0.5 is its second half."""
    loss_within: Annotated[float, Field(ge=0.0)] | None = None
    """In addition, the loss is at most this share above its level before the onset."""


class Rung(Strict):
    """Fields of every rung."""

    revertible: ClassVar[bool] = False
    """Whether the ranks can undo it."""
    scopes: ClassVar[tuple[Scope, ...]] = ("run",)
    command_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of the rung that are sent in the command unchanged (absent ones stay absent)."""

    action: str
    scope: Scope | None = None
    """What the action is applied to; absent: the action's own default (its first allowed scope)."""
    mode: Mode | None = None
    """Can only lower the rule's mode, for this rung alone. approve: a person is asked before it is taken. observe: it
    is recorded as proposed, and the next rung is taken. Absent: the rule's mode."""
    settle_steps: Steps = 20
    """Steps after the action was applied in which nothing else is done and nothing is judged."""
    hold_steps: Steps | None = None
    """Steps after which a return is tried. Absent: kept for the rest of the run."""
    hold_growth: Annotated[int, Field(ge=2, le=16)] = 2
    """Hysteresis: after a failed return the next hold is this many times longer."""
    undo_without_effect: bool = True
    """Undo the action when it had no effect (unless the next rung builds on it). False: keep it and go on."""
    requires: Requires = Requires()
    verify: Verify = Verify()
    if_loss_above: Annotated[float, Field(ge=0.0)] | None = None
    """Take this rung although the previous one has helped, if the loss (median of the last 5 steps) is still more than
    this share above its level before the onset (median of 32 steps): 0.05 is 5 %."""

    @field_validator("scope")
    @classmethod
    def _scope_fits(cls, value: Scope | None) -> Scope | None:
        if value is not None and value not in cls.scopes:
            raise ValueError(f"this action knows the scopes {', '.join(cls.scopes)}, not {value}")
        return value

    def command_params(self) -> dict[str, Any]:
        """The parameters that are sent to the ranks as the policy gives them."""
        values = {name: getattr(self, name) for name in self.command_fields}
        return {name: value for name, value in values.items() if value is not None}


class LengthenWarmup(Rung):
    """While in warm-up: LR = schedule at t0 + (t - t0) / stretch until both meet."""

    revertible: ClassVar[bool] = True
    command_fields: ClassVar[tuple[str, ...]] = ("stretch",)
    action: Literal["lengthen_warmup"]
    stretch: Annotated[float, Field(gt=1.0, le=100.0)] = 4.0
    """How many times longer the rest of the warm-up becomes."""


class Rewarm(Rung):
    """A factor on the LR that rises from `start_factor` to 1 over `steps`."""

    revertible: ClassVar[bool] = True
    command_fields: ClassVar[tuple[str, ...]] = ("steps", "start_factor")
    action: Literal["rewarm"]
    steps: Count = 100
    start_factor: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1


class HoldLr(Rung):
    """A factor on the LR; absent: back to the level before the jump if the LR jumped, else 0.5."""

    revertible: ClassVar[bool] = True
    command_fields: ClassVar[tuple[str, ...]] = ("factor",)
    action: Literal["hold_lr"]
    factor: Annotated[float, Field(ge=0.0, le=1.0)] | None = None


class TightenClip(Rung):
    """min(the user's limit, ours). `max_norm` absent: `times_median` times the recent median gradient norm.

    `per_tensor` instead limits each gradient tensor to that many times its own usual norm, and sets no global limit."""

    revertible: ClassVar[bool] = True
    command_fields: ClassVar[tuple[str, ...]] = ("max_norm", "per_tensor")
    action: Literal["tighten_clip"]
    max_norm: Annotated[float, Field(ge=0.0)] | None = None
    per_tensor: Annotated[float, Field(ge=1.0, le=100.0)] | None = None
    times_median: Annotated[float, Field(gt=0.0)] = 1.5
    undo_above_clip_rate: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Undo it once more than this share of 300 steps was clipped: that is a stall, not a cure. Absent: never."""


class SkipUpdate(Rung):
    """Standing rule in the ranks: an optimizer step on a non-finite gradient is skipped."""

    action: Literal["skip_update"]
    max_consecutive: Annotated[int, Field(ge=0, le=1000)] = 3
    """With more in a row the next rung is taken (reference: at most 3)."""


class AdjustLossScale(Rung):
    """Multiply the loss scale."""

    revertible: ClassVar[bool] = True
    command_fields: ClassVar[tuple[str, ...]] = ("factor",)
    action: Literal["adjust_loss_scale"]
    factor: Annotated[float, Field(gt=0.0)] = 0.5


class RaiseMargin(Rung):
    """More head-room: scale / 2^bits. Does not change the signal-to-noise ratio of ordinary tensors."""

    revertible: ClassVar[bool] = True
    scopes: ClassVar[tuple[Scope, ...]] = ("run",)
    command_fields: ClassVar[tuple[str, ...]] = ("bits",)
    action: Literal["raise_margin"]
    bits: Annotated[float, Field(gt=0.0, le=8.0)] = 1.0
    if_what_if_helps: bool = True
    """Pass the rung over when what-if figures from after the onset show, for every tensor concerned, that it gains
    nothing. Without such figures it is taken."""


class RepairScale(Rung):
    """Purge poisoned amax windows and set the scale from a clean amax."""

    scopes: ClassVar[tuple[Scope, ...]] = ("tensor", "layer", "run")
    action: Literal["repair_scale"]


class Bf16Layers(Rung):
    """Run the layers of the finding in BF16; return one layer at a time after `hold_steps`."""

    revertible: ClassVar[bool] = True
    scopes: ClassVar[tuple[Scope, ...]] = ("layer",)
    action: Literal["bf16_layers"]
    max_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.15
    """Share of the FP8 modules that may be in BF16 by this action; at least one module is always allowed."""
    if_what_if_helps: bool = True
    """Pass the rung over when what-if figures from after the onset show that every tensor concerned is cast as well as
    its format allows. Without such figures it is taken."""


class Bf16All(Rung):
    """Run every FP8 module in BF16."""

    revertible: ClassVar[bool] = True
    action: Literal["bf16_all"]


class CheckpointNow(Rung):
    """Save at the next boundary."""

    action: Literal["checkpoint_now"]
    settle_steps: Steps = 0


class CheckpointCadence(Rung):
    """Save every this many steps while it is in force."""

    revertible: ClassVar[bool] = True
    command_fields: ClassVar[tuple[str, ...]] = ("every",)
    action: Literal["checkpoint_cadence"]
    every: Count = 50
    settle_steps: Steps = 0


class Recheck(Rung):
    """Run the coming batch twice and compare: is it a faulty device, or a numerical fault?"""

    action: Literal["recheck"]


class Change(Strict):
    """What a rollback changes before the replay, so that it does not repeat what went wrong."""

    action: Literal["bf16_all", "bf16_layers", "hold_lr", "rewarm", "tighten_clip", "raise_margin"]
    params: dict[str, float | int] = Field(default_factory=dict)


class Rollback(Rung):
    """Back to the newest good checkpoint before the onset. Actions in force (BF16, LR factor) stay in force."""

    action: Literal["rollback"]
    skip_batches: Annotated[int, Field(ge=0, le=MAX_SKIP_BATCHES)] = 0
    """Batches to leave out, starting at the checkpoint's data position."""
    skip_to_onset: bool = False
    """Leave out the batches up to and including that of the onset step too, with `skip_batches` on top (the total is
    bounded as `skip_batches` alone is)."""
    margin_steps: Steps = 0
    """Extra distance between checkpoint and onset, for an onset that is only estimated."""
    changes: list[Change] = Field(default_factory=list)
    if_none_is_good: Literal["refuse", "candidate"] = "refuse"
    """Whether a candidate from before the onset will do where no checkpoint is known to be good yet: one saved fewer
    than `healthy_steps` before the onset never will be. For onsets that are known to the step."""
    if_data_position_missing: Literal["refuse", "accept"] = "refuse"
    """Whether a checkpoint without a data position will do: the model then sees the same data again."""


class Halt(Rung):
    """Stop the run on all ranks at one boundary; it starts again only after `fp8watch runs release RUN`."""

    action: Literal["halt"]
    settle_steps: Steps = 0


AnyRung = Annotated[
    LengthenWarmup | Rewarm | HoldLr | TightenClip | SkipUpdate | AdjustLossScale | RaiseMargin | RepairScale
    | Bf16Layers | Bf16All | CheckpointNow | CheckpointCadence | Recheck | Rollback | Halt,
    Field(discriminator="action"),
]  # fmt: skip
