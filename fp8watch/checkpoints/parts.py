"""The live objects of one training process that a checkpoint captures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fp8watch.capture.controls import Fp8Controls
from fp8watch.capture.gradients import has_scaler


class DataPosition(Protocol):
    """The position in the data, which can be saved and restored."""

    @property
    def samples(self) -> int:
        """Samples handed out so far in this timeline."""

    @property
    def unavailable(self) -> str | None:
        """Why the position cannot be saved or restored; None: it can."""

    def state_dict(self) -> dict[str, Any]:
        """The position, as tensors and plain values."""

    def load_state_dict(self, state: dict[str, Any], skip_batches: int = 0) -> None:
        """Go to a position and skip the next `skip_batches` batches."""


@dataclass(slots=True, kw_only=True)
class TrainingParts:
    """The live objects. `data` may be set later, when the loop asks for its batches."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any | None = None
    """Any object with state_dict and load_state_dict."""
    scaler: Any | None = None
    """A `torch.amp.GradScaler`; a disabled one counts as none."""
    controls: Fp8Controls | None = None
    data: DataPosition | None = None
    also: Mapping[str, Any] = field(default_factory=dict)
    """Other objects with state_dict and load_state_dict, by name."""

    @property
    def data_unavailable(self) -> str | None:
        """Why a checkpoint would hold no data position; None: it would hold one."""
        if self.data is None:
            return "no rewindable batches: iterate over watch.batches(loader)"
        return self.data.unavailable

    @property
    def active_scaler(self) -> Any | None:
        """The scaler, if it is enabled."""
        return self.scaler if has_scaler(self.scaler) else None
