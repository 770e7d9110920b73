"""Checksum of the parameters from which the first optimizer update after a restore starts."""

from __future__ import annotations

from typing import Any

import torch

from fp8watch.actions.context import ActionContext
from fp8watch.checkpoints.checksum import parameter_checksum


class FirstUpdate:
    """An optimizer hook that takes the parameters' checksum right before the next update and then removes itself."""

    def __init__(self, context: ActionContext) -> None:
        self.checksum: str | None = None
        self._model = context.model
        self._handle = context.optimizer.register_step_pre_hook(self._look)

    def _look(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.checksum = parameter_checksum(self._model)
        self.remove()

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()
