"""Where a monitor listens: every cast and every scale update of the process passes here.

As in Transformer Engine there is one place for all models; a tap ignores modules that are not its own. Taps
run on the thread of the cast (autograd's in a backward pass), must not raise, and must not change what they get.
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
    """Listener; never told of recomputation, and of evaluation (no_grad) neither."""

    def wants_statistics(self, module: Fp8Linear) -> bool:
        """Whether the next cast of this module is to be counted."""

    def on_cast(
        self, module: Fp8Linear, tensor: int, *, high_precision: bool, statistics: CastStatistics | None
    ) -> None:
        """A tensor (INPUT, WEIGHT, GRAD_OUTPUT) was cast, or only measured when in high precision."""

    def on_update(
        self, modules: Sequence[Fp8Linear], *, is_forward: bool, amax: torch.Tensor, scale: torch.Tensor
    ) -> None:
        """Just before an update: reduced amax and the scales in force until now, concatenated, float32.

        Forward: two elements a module (input, weight); backward: one (grad_output).
        """


class ValueTap(Protocol):
    """Somebody who wants to look at what is cast, in the steps in which it listens. The rules are those of `Tap`."""

    def on_values(
        self, module: Fp8Linear, tensor: int, *, values: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format,
        amax: torch.Tensor,
    ) -> None:  # fmt: skip
        """Just before the cast of `values` with `scale`; not called in high precision."""


_taps: list[Tap] = []
_value_taps: list[ValueTap] = []


def add_tap(tap: Tap) -> None:
    """Listen from now on."""
    _taps.append(tap)


def remove_tap(tap: Tap) -> None:
    """Stop listening; nothing happens if it does not listen."""
    _taps[:] = [other for other in _taps if other is not tap]


def all_taps() -> Sequence[Tap]:
    """Those that listen now."""
    return _taps


def add_value_tap(tap: ValueTap) -> None:
    """Look at values from now on."""
    _value_taps.append(tap)


def remove_value_tap(tap: ValueTap) -> None:
    """Stop looking; nothing happens if it does not."""
    _value_taps[:] = [other for other in _value_taps if other is not tap]


def all_value_taps() -> Sequence[ValueTap]:
    """Those that look now."""
    return _value_taps
