"""What actions act on: the live objects and controls of one training process.

The training side makes one context at attach and hands it to `registry.build_actions`. Actions run on the
training thread at a step boundary only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fp8watch.actions.clip_control import ClipControl
from fp8watch.actions.lr_control import LrControl
from fp8watch.actions.skip_guard import SkipGuard
from fp8watch.capture.controls import Fp8Controls
from fp8watch.checkpoints.manager import CheckpointManager
from fp8watch.checkpoints.parts import DataPosition, TrainingParts


@dataclass(slots=True, kw_only=True)
class ActionContext:
    """Everything an action may need; what is None makes the actions that need it unavailable."""

    parts: TrainingParts
    lr: LrControl
    clip: ClipControl
    skip: SkipGuard
    checkpoints: CheckpointManager | None = None

    step: Callable[[], int]
    """Optimizer updates done in this timeline (`watch.global_step`)."""
    attempt: Callable[[], int]
    """The attempt now running."""
    rewind: Callable[[int], None]
    """Called after a restore with the step to count on from: sets the step counter, begins a new attempt and
    forgets what was collected of the step under way."""
    note: Callable[[str], None] = lambda text: None
    """Says something to the person who trains, once."""
    forward: Callable[[], torch.Tensor] | None = None
    """Runs the coming batch forward and returns its loss, without taking the batch (for `recheck`)."""

    halt_reason: str | None = None
    """Set by `halt`: the core raises `Halted` with it at the end of the boundary."""
    elsewhere: tuple[str, ...] = ()
    """FP8 modules that other ranks hold and this one does not (pipeline stages, experts): nothing to do for them."""
    high_precision: dict[str, list[str]] = field(default_factory=dict)
    """What holds modules in BF16: key of an applied action -> its modules. A rollback leaves them there."""

    @property
    def model(self) -> torch.nn.Module:
        """The model being trained."""
        return self.parts.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Its optimizer."""
        return self.parts.optimizer

    @property
    def lr_scheduler(self) -> Any | None:
        """The scheduler, as it was given."""
        return self.parts.scheduler

    @property
    def scaler(self) -> Any | None:
        """The gradient scaler, if it is enabled."""
        return self.parts.active_scaler

    @property
    def controls(self) -> Fp8Controls | None:
        """The FP8 modules' controls."""
        return self.parts.controls

    @property
    def data(self) -> DataPosition | None:
        """The data position."""
        return self.parts.data
