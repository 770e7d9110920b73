"""The live objects and controls of one training process, on which actions work.

The training side builds one context at attach and passes it to `registry.build_actions`. Actions run only on the
training thread, at a step boundary.
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
    """Everything an action may need. An action whose field is None is unavailable."""

    parts: TrainingParts
    lr: LrControl
    clip: ClipControl
    skip: SkipGuard
    checkpoints: CheckpointManager | None = None

    step: Callable[[], int]
    """Number of optimizer updates in this timeline (`watch.global_step`)."""
    attempt: Callable[[], int]
    """The current attempt."""
    rewind: Callable[[int], None]
    """Called after a restore with the step to continue from: sets the step counter, starts a new attempt and discards
    what was collected for the current step."""
    note: Callable[[str], None] = lambda text: None
    """Shows a message to the user, once."""
    forward: Callable[[], torch.Tensor] | None = None
    """Runs the next batch forward and returns its loss, without consuming the batch (for `recheck`)."""

    halt_reason: str | None = None
    """Reason of a pending halt: `Watch.step` raises `Halted` with it at the end of the boundary."""
    elsewhere: tuple[str, ...] = ()
    """FP8 modules that only other ranks hold (pipeline stages, experts); actions ignore them here."""
    high_precision: dict[str, list[str]] = field(default_factory=dict)
    """Modules held in BF16: key of an applied action -> its modules. A rollback does not change them."""

    @property
    def model(self) -> torch.nn.Module:
        """The model being trained."""
        return self.parts.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The model's optimizer."""
        return self.parts.optimizer

    @property
    def lr_scheduler(self) -> Any | None:
        """The LR scheduler that was passed to attach."""
        return self.parts.scheduler

    @property
    def scaler(self) -> Any | None:
        """The gradient scaler, if it is enabled."""
        return self.parts.active_scaler

    @property
    def controls(self) -> Fp8Controls | None:
        """The controls of the FP8 modules."""
        return self.parts.controls

    @property
    def data(self) -> DataPosition | None:
        """The data position."""
        return self.parts.data
