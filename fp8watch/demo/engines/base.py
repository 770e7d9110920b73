"""What the trainer and the injector ask of an engine. Nothing that watches a run is known here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from fp8watch.demo.config import EngineName

Region = Callable[[], AbstractContextManager[object]]
"""Makes what each forward of a converted model runs in."""


class Scales(Protocol):
    """Delayed scaling of one layer in one direction, as it lies in the engine: what is written here is cast with."""

    scale: torch.Tensor
    """float32 [n]: of the tensors that are cast, n = 2 forward (input, weight) and 1 backward (grad_output)."""
    amax_history: torch.Tensor
    """float32 [history_len, n], the newest in the last row."""

    def stick(self) -> None:
        """From now on an update runs and never reaches `scale`."""


class Engine(Protocol):
    """One way to FP8. Holds nothing: what belongs to a training is in its model and region."""

    name: EngineName

    def convert(self, model: nn.Module, *, amax_history_len: int) -> Region:
        """Put the linear layers under `blocks.` into FP8, in place, with their weights and names as they are.

        Before the optimizer is made. Delayed scaling, HYBRID, the maximum of a window of `amax_history_len` updates,
        margin 0; everything outside the FP8 GEMMs stays in the dtype of the parameters.
        """

    def scales(self, model: nn.Module, layer: str | None) -> Iterator[tuple[Scales, Scales]]:
        """(forward, backward) of each FP8 layer, or of the one of that name. None before a layer's first forward."""
