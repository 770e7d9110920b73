"""What the trainer and the fault injector need from an engine. Nothing here knows what watches a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from fp8watch.demo.config import EngineName

Region = Callable[[], AbstractContextManager[object]]
"""Makes the context that each forward of a converted model runs in."""


class Scales(Protocol):
    """Delayed scaling of one layer in one direction, as the engine holds it: values written here are used by the
    casts."""

    scale: torch.Tensor
    """float32 [n], one per cast tensor: n = 2 forward (input, weight), 1 backward (grad_output)."""
    amax_history: torch.Tensor
    """float32 [history_len, n], the newest in the last row."""

    def stick(self) -> None:
        """From now on updates run but never reach `scale`."""


class Engine(Protocol):
    """One way to run FP8. Holds no state: what belongs to a training is in its model and region."""

    name: EngineName

    def convert(self, model: nn.Module, *, amax_history_len: int) -> Region:
        """Convert the linear layers under `blocks.` to FP8, in place, keeping their weights and names.

        Call it before the optimizer is made. Delayed scaling, HYBRID, the maximum of a window of `amax_history_len`
        updates, margin 0; everything outside the FP8 GEMMs keeps the dtype of the parameters.
        """

    def scales(self, model: nn.Module, layer: str | None) -> Iterator[tuple[Scales, Scales]]:
        """(forward, backward) of each FP8 layer, or of the named one. None before a layer's first forward."""
