"""Scales and amax history of the tensors that one module casts in one direction.

The layout is Transformer Engine's: `scale` float32 [n], `amax_history` float32 [history_len, n]. Casts write their
amax into row 0; an update rolls it to the last row (newest last) and zeroes row 0. So with a history of length 1 the
stored history is zero after every update.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8watch.emulation import checks
from fp8watch.emulation.recipe import MAX_HISTORY, DelayedScaling
from fp8watch.formats import Fp8Format

_TENSORS = ("scale", "amax_history", "newest_amax")
_FLOAT_MAX = torch.finfo(torch.float32).max


class ScalingState:
    """Counterpart of Transformer Engine's `RecipeState`. Tensors change in place only; scales start at 1, amaxes at 0.

    Raises `TypeError` and `ValueError` as `DelayedScaling` does.
    """

    def __init__(self, tensors: Sequence[str], fmt: Fp8Format, history_len: int, device: torch.device) -> None:
        if isinstance(tensors, str) or not tensors or not all(isinstance(name, str) for name in tensors):
            raise TypeError(f"tensors: the names of one or more tensors are wanted, got {tensors!r}")
        checks.of_kind("fmt", fmt, Fp8Format, "one of fp8watch.formats")
        checks.whole("history_len", history_len, 1, MAX_HISTORY)
        self.tensors = tuple(tensors)
        self.fmt = fmt
        self.scale = torch.ones(len(self.tensors), dtype=torch.float32, device=device)
        self.amax_history = torch.zeros(history_len, len(self.tensors), dtype=torch.float32, device=device)
        self.newest_amax = torch.zeros(len(self.tensors), dtype=torch.float32, device=device)
        """Reduced amax of the last update in which the tensor ran, also if the history no longer holds it."""

    def record(self, amax: torch.Tensor) -> None:
        """Add the amax [n] of a cast to row 0 (maximum, NaN ignored)."""
        row = self.amax_history[0]
        torch.fmax(row, amax, out=row)

    def _demanded(self, amax: torch.Tensor, margin: float, today: torch.Tensor) -> torch.Tensor:
        """fp8_max * 2^-margin / amax; FLT_MAX where that is infinite, `today` where amax is 0, infinite or NaN."""
        # A true division, as in the kernel: `number / tensor` would be a reciprocal and a product, one ulp off.
        wanted = torch.full_like(amax, self.fmt.max * 2.0**-margin).div_(amax).clamp_(max=_FLOAT_MAX)
        return torch.where(torch.isfinite(amax) & (amax > 0), wanted, today)

    def update(self, recipe: DelayedScaling, amax: torch.Tensor) -> None:
        """Roll the history and set the scales from the window, like the fused kernel in delayed_scaling.cu.

        `amax` [n] is row 0 after the reduction over ranks. A tensor whose amax is 0 did not run: its history and its
        scale do not change.
        """
        history = self.amax_history
        has_run = amax != 0
        rolled = torch.roll(history, -1, 0)
        rolled[-1] = amax
        if recipe.amax_compute_algo == "most_recent":
            window = amax
        else:
            window = torch.nan_to_num(rolled, nan=0.0, posinf=torch.inf).amax(0)
        scale = self._demanded(window, recipe.margin, self.scale)
        rolled[0] = 0
        self.scale.copy_(torch.where(has_run, scale, self.scale))
        history.copy_(torch.where(has_run, rolled, history))

    def purge(self, recipe: DelayedScaling, index: int | None = None) -> None:
        """Remove non-finite values from the window and set the scale from the rest, at once.

        `index`: one tensor; None: all. The newest amax counts even if a faulty update kept it out of the history.
        """
        chosen = slice(None) if index is None else slice(index, index + 1)
        history, newest, scale = self.amax_history[:, chosen], self.newest_amax[chosen], self.scale[chosen]
        torch.nan_to_num_(history, nan=0.0, posinf=0.0)
        torch.nan_to_num_(newest, nan=0.0, posinf=0.0)
        window = torch.maximum(history.amax(0), newest)
        if recipe.amax_compute_algo == "most_recent":
            window = torch.where(newest > 0, newest, window)
        scale.copy_(self._demanded(window, recipe.margin, scale))

    def to(self, device: torch.device) -> None:
        """Move to a device. Stays float32 even if the module is cast to another dtype."""
        self.scale = self.scale.to(device)
        self.amax_history = self.amax_history.to(device)
        self.newest_amax = self.newest_amax.to(device)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors."""
        return {name: getattr(self, name).clone() for name in _TENSORS}

    def check_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Raise `KeyError` or `ValueError` if `load_state_dict` could not restore this state."""
        for name in _TENSORS:
            own: torch.Tensor = getattr(self, name)
            if state[name].shape != own.shape:
                raise ValueError(f"{name} is {tuple(state[name].shape)}, not {tuple(own.shape)}")

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore in place. Raises as `check_state_dict`, with nothing changed."""
        self.check_state_dict(state)
        for name in _TENSORS:
            getattr(self, name).copy_(state[name])
