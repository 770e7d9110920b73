"""Taps: listeners that a monitor adds, called for every cast and every scale update of the process.

As in Transformer Engine there is one place for all models; a tap ignores modules that are not its own. Taps run on the
thread of the cast (autograd's in a backward pass), must not raise, and must not change their arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from fp8watch.emulation.linear import Fp8Linear
    from fp8watch.emulation.statistics import CastStatistics
    from fp8watch.formats import Fp8Format

INPUT, WEIGHT, GRAD_OUTPUT = range(3)


class Tap(Protocol):
    """Listener. It is not called for recomputation or evaluation (no_grad)."""

    def wants_statistics(self, module: Fp8Linear) -> bool:
        """Whether to count the next cast of this module."""

    def on_cast(
        self, module: Fp8Linear, tensor: int, *, high_precision: bool, statistics: CastStatistics | None
    ) -> None:
        """A tensor (INPUT, WEIGHT, GRAD_OUTPUT) was cast, or in high precision only measured."""

    def on_update(
        self, modules: Sequence[Fp8Linear], *, is_forward: bool, amax: torch.Tensor, scale: torch.Tensor
    ) -> None:
        """Just before an update: the reduced amaxes and the old scales, concatenated, float32.

        Forward: two elements per module (input, weight); backward: one (grad_output).
        """


class ValueTap(Protocol):
    """Listener for the values that are cast. The rules of `Tap` apply."""

    def on_values(
        self, module: Fp8Linear, tensor: int, *, values: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format,
        amax: torch.Tensor,
    ) -> None:  # fmt: skip
        """Just before the cast of `values` with `scale`; not called in high precision."""


_taps: list[Tap] = []
_value_taps: list[ValueTap] = []


def add_tap(tap: Tap) -> None:
    """Start listening."""
    _taps.append(tap)


def remove_tap(tap: Tap) -> None:
    """Stop listening; no effect if it does not listen."""
    _taps[:] = [other for other in _taps if other is not tap]


def all_taps() -> Sequence[Tap]:
    """All current taps."""
    return _taps


def add_value_tap(tap: ValueTap) -> None:
    """Start listening to values."""
    _value_taps.append(tap)


def remove_value_tap(tap: ValueTap) -> None:
    """Stop listening to values; no effect if it does not listen."""
    _value_taps[:] = [other for other in _value_taps if other is not tap]


def all_value_taps() -> Sequence[ValueTap]:
    """All current value taps."""
    return _value_taps
