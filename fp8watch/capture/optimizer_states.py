"""FP8 optimizer states: how large the moments are, and how much of them has become zero.

Two layouts hold Adam's moments in FP8 with a scale for each group of neighbouring elements:

- torchao's `AdamWFp8` and `AdamFp8` (0.18 `optim/subclass_fp8.py`): a tensor of class `OptimStateFp8` with `codes`
  (E4M3) and `scale` (float32, one per block of 256); a value is code * scale;
- COAT (arXiv 2410.19313, `optimizer/fp8_adamw.py`): `exp_avg` in FP8 and `scale_exp_avg`, one per group of 128; with
  dynamic range expansion also `expand_exp_avg` and `sqrt_minmax_exp_avg`, and a value is
  sign * |code * scale|^(1 / expand) * sqrt_minmax.

The values before quantization are gone, so underflow is estimated: the share of elements whose code is 0 in a group
that holds anything else. That is an upper bound, because an exact zero (a row whose token never occurred) looks the
same. Read on sampled steps, in a few operations per parameter, without waiting for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")
PARAMETERS_A_CALL = 32
"""Each takes about twenty kernel launches; a model of a thousand parameters is read in thirty samples."""
REST_CALLS = 255
"""Samples skipped after no moment was found in FP8: that does not change during a run."""
_FP8 = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, name)
)
_PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment of one parameter: FP8 codes in groups of `codes.numel() / scale.numel()` neighbours."""

    codes: torch.Tensor
    scale: torch.Tensor
    expand: torch.Tensor | None = None
    sqrt_minmax: torch.Tensor | None = None

    def groups(self) -> torch.Tensor:
        """float32 [num_groups, group]: magnitudes of the codes. An incomplete last group is padded with zeros."""
        flat = self.codes.detach().reshape(-1).float().abs()
        num = self.scale.numel()
        group = -(-flat.numel() // num)
        short = num * group - flat.numel()
        return (torch.nn.functional.pad(flat, (0, short)) if short else flat).view(num, group)


def find(state: Mapping[str, Any], moment: str) -> Moment | str | None:
    """The moment in a parameter's optimizer state; a str describes an unknown layout; None: it is not FP8."""
    value = state.get(moment)
    if type(value) is torch.Tensor and value.dtype in _PLAIN:
        return None  # most moments: nothing else is asked of them
    if not isinstance(value, torch.Tensor):
        return None
    if hasattr(value, "to_local"):
        value = value.to_local()
    codes, scale = getattr(value, "codes", None), getattr(value, "scale", None)
    if isinstance(codes, torch.Tensor) and isinstance(scale, torch.Tensor):
        if codes.dtype not in _FP8 or not scale.numel() or codes.numel() % scale.numel():
            return f"{type(value).__name__} of {codes.dtype} with {scale.numel()} scales"
        return Moment(codes, scale)
    scale = state.get(f"scale_{moment}")
    if value.dtype in _FP8:
        if not isinstance(scale, torch.Tensor) or not scale.numel():
            return f"{value.dtype} without a scale in a known place"
        expand, centre = state.get(f"expand_{moment}"), state.get(f"sqrt_minmax_{moment}")
        return Moment(value, scale, expand, centre)
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or not value.is_floating_point():
        return f"{type(value).__name__} of {value.dtype}"
    return None


class OptimizerStates:
    """Reads the moments of one optimizer, `PARAMETERS_A_CALL` parameters per call, in turn."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.not_observable: str | None = None
        """Why existing quantized moments cannot be read."""
        self._held: dict[str, torch.Tensor] = {}
        """Moment -> float32 [3, num_parameters]: amax, zeros, elements as last read."""
        self._next = 0
        self._rest = 0
        """Calls still to skip, because nothing was in FP8."""

    def read(self) -> dict[str, torch.Tensor]:
        """0-D float32 by name, over all parameters read so far: `exp_avg_amax`, `exp_avg_underflow_ratio`,
        `exp_avg_underflow_ratio_max` (worst parameter), and the same for `exp_avg_sq`. Empty without FP8 moments."""
        if self._rest > 0:
            self._rest -= 1
            return {}
        if not self._optimizer.state:
            return {}  # before the first update
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        turn = [(self._next + i) % len(parameters) for i in range(min(PARAMETERS_A_CALL, len(parameters)))]
        self._next = (turn[-1] + 1) % len(parameters)
        states = self._optimizer.state
        for row in turn:
            state = states.get(parameters[row], {})
            for moment in MOMENTS:
                if (found := find(state, moment)) is not None:
                    self._hold(moment, row, len(parameters), found)
        if not self._held:
            self._rest = REST_CALLS if self._next == 0 or len(turn) == len(parameters) else 0
            return {}
        values: dict[str, torch.Tensor] = {}
        for moment, held in self._held.items():
            amax, zeros, elements = held.unbind()
            values[f"{moment}_amax"] = amax.amax()
            values[f"{moment}_underflow_ratio"] = zeros.sum() / elements.sum()
            values[f"{moment}_underflow_ratio_max"] = (zeros / elements.clamp(min=1)).amax()
        return values

    def _hold(self, moment: str, row: int, num: int, found: Moment | str) -> None:
        if isinstance(found, str):
            self.not_observable = f"quantized moments of another layout: {found}"
            return
        figures = torch.stack(_figures(found))
        held = self._held.get(moment)
        if held is None or held.shape[1] != num:
            held = self._held[moment] = torch.zeros(3, num, dtype=torch.float32, device=figures.device)
        held[:, row].copy_(figures, non_blocking=True)


def _figures(moment: Moment) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """amax, zeros in groups that are not all zero, number of elements: each 0-D float32."""
    codes = moment.groups()
    largest = codes.amax(1)
    value = largest * moment.scale.detach().float().reshape(-1)
    if moment.expand is not None:
        value = value.pow(moment.expand.detach().float().reshape(-1).reciprocal())
    if moment.sqrt_minmax is not None:
        value = value * moment.sqrt_minmax.detach().float().reshape(-1)
    padding = codes.numel() - moment.codes.numel()
    zeros = (codes == 0).sum(1)
    if padding:
        zeros[-1] -= padding
    zeros = torch.where(largest > 0, zeros, 0).sum()
    elements = torch.full((), float(moment.codes.numel()), dtype=torch.float32, device=codes.device)
    return torch.where(largest > 0, value, 0.0).amax(), zeros.float(), elements
