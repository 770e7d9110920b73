"""What a checkpoint is made of: the live objects of one training process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fp8watch.capture.controls import Fp8Controls
from fp8watch.capture.gradients import has_scaler


class DataPosition(Protocol):
    """Where the run is in its data, and how to go back there."""

    @property
    def samples(self) -> int:
        """Samples handed out so far in this timeline."""

    @property
    def unavailable(self) -> str | None:
        """Why the position cannot be saved or restored; None: it can."""

    def state_dict(self) -> dict[str, Any]:
        """The position (tensors and plain values only)."""

    def load_state_dict(self, state: dict[str, Any], skip_batches: int = 0) -> None:
        """Go to a position and leave out the batches that come first there."""


@dataclass(slots=True, kw_only=True)
class TrainingParts:
    """The live objects. `data` may be set later, when the loop asks for its batches."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any | None = None
    """Anything with state_dict and load_state_dict."""
    scaler: Any | None = None
    """A `torch.amp.GradScaler`; a disabled one counts as none."""
    controls: Fp8Controls | None = None
    data: DataPosition | None = None
    also: Mapping[str, Any] = field(default_factory=dict)
    """Anything else with state_dict and load_state_dict, by name."""

    @property
    def data_unavailable(self) -> str | None:
        """Why a checkpoint would hold no data position; None: it holds one."""
        if self.data is None:
            return "no rewindable batches: iterate over watch.batches(loader)"
        return self.data.unavailable

    @property
    def active_scaler(self) -> Any | None:
        """The scaler, if it is enabled."""
        return self.scaler if has_scaler(self.scaler) else None
