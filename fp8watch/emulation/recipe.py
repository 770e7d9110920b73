"""The delayed-scaling recipe: a mutable object, as in Transformer Engine, read at every scale update.

`margin`, `amax_compute_algo` and `reduce_amax` may be changed during a run and take effect at the next update; values
are checked in the constructor and when set. `fp8_format` and `amax_history_len` are read when a module is made; a later
change is ignored, as in Transformer Engine for the same recipe object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fp8watch.emulation import checks
from fp8watch.formats import E4M3, E5M2, MAX_MARGIN, Fp8Format

FormatName = Literal["HYBRID", "E4M3"]
AmaxAlgorithm = Literal["max", "most_recent"]
MAX_HISTORY = 65_536
"""Updates: 64 times Transformer Engine's default, and 0.75 MB per layer."""


@dataclass(slots=True, kw_only=True, eq=False)
class DelayedScaling:
    """Scale of a tensor = fp8_max * 2^-margin / amax over a window of past updates.

    Defaults are those of Transformer Engine 2.20's `DelayedScaling`. Raises `TypeError` for a wrong type, `ValueError`
    for a value that is out of bounds or unknown.
    """

    margin: float = 0.0
    """Headroom in powers of two, from -16 to 16 (`fp8watch.formats.MAX_MARGIN`)."""
    fp8_format: FormatName = "HYBRID"
    """HYBRID: E4M3 for input and weight, E5M2 for gradients. E4M3: E4M3 for all."""
    amax_history_len: int = 1024
    """Window in updates (micro-batches, not optimizer steps), from 1 to `MAX_HISTORY`."""
    amax_compute_algo: AmaxAlgorithm = "max"
    """Which amax of the window sets the scale."""
    reduce_amax: bool = True
    """Take the maximum over the process group before the update."""

    def __setattr__(self, name: str, value: Any) -> None:
        check = _CHECKS.get(name)
        if check is not None:
            check(name, value)
        object.__setattr__(self, name, value)

    @property
    def forward_format(self) -> Fp8Format:
        """Format of input and weight."""
        return E4M3

    @property
    def backward_format(self) -> Fp8Format:
        """Format of the output's gradient."""
        return E5M2 if self.fp8_format == "HYBRID" else E4M3


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "margin": lambda name, value: checks.number(name, value, -MAX_MARGIN, MAX_MARGIN),
    "fp8_format": lambda name, value: checks.one_of(name, value, get_args(FormatName)),
    "amax_history_len": lambda name, value: checks.whole(name, value, 1, MAX_HISTORY),
    "amax_compute_algo": lambda name, value: checks.one_of(name, value, get_args(AmaxAlgorithm)),
    "reduce_amax": lambda name, value: checks.of_kind(name, value, bool, "True or False"),
}
