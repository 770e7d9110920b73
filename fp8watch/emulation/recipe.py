"""The delayed-scaling recipe: a mutable object, as in Transformer Engine, read at every scale update.

`margin`, `amax_compute_algo` and `reduce_amax` may be changed while a run goes on and take effect at the next
update. `fp8_format` and `amax_history_len` are read when a module is made; a later change is ignored, as
Transformer Engine does for the same recipe object.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from fp8watch.formats import E4M3, E5M2, Fp8Format

FormatName = Literal["HYBRID", "E4M3"]
AmaxAlgorithm = Literal["max", "most_recent"]


@dataclass(slots=True, kw_only=True, eq=False)
class DelayedScaling:
    """Scale of a tensor = fp8_max * 2^-margin / amax over a window of past updates.

    Defaults are those of Transformer Engine 2.20's `DelayedScaling`. Raises `ValueError` for what it does not know.
    """

    margin: float = 0.0
    """Head-room in powers of two."""
    fp8_format: FormatName = "HYBRID"
    """HYBRID: E4M3 for input and weight, E5M2 for gradients. E4M3: that for all."""
    amax_history_len: int = 1024
    """Window in updates (micro-batches, not optimizer steps)."""
    amax_compute_algo: AmaxAlgorithm = "max"
    """What is taken from the window."""
    reduce_amax: bool = True
    """Take the maximum over the process group before the update."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.margin):
            raise ValueError(f"margin must be finite, not {self.margin}")
        if self.fp8_format not in get_args(FormatName):
            raise ValueError(f"fp8_format must be one of {get_args(FormatName)}, not {self.fp8_format!r}")
        if self.amax_history_len < 1:
            raise ValueError(f"amax_history_len must be at least 1, not {self.amax_history_len}")
        if self.amax_compute_algo not in get_args(AmaxAlgorithm):
            raise ValueError(f"amax_compute_algo must be one of {get_args(AmaxAlgorithm)}")

    @property
    def forward_format(self) -> Fp8Format:
        """Format of input and weight."""
        return E4M3

    @property
    def backward_format(self) -> Fp8Format:
        """Format of the output's gradient."""
        return E5M2 if self.fp8_format == "HYBRID" else E4M3
