"""The step's scalars, in whatever form the trainer gives them, taken without waiting for a device.

A value that is on the host already is kept as a float, any other as a device tensor, which the ring brings to the
host later. A loss that cannot be used is described, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

Scalar = float | torch.Tensor
GIVEN = ("attention_logit_max", "kurtosis", "zero_grad_ratio", "reference_loss")
"""Names that `watch.record` takes."""


class NotAScalar(ValueError):
    """A value that is not a scalar; the message says what is wanted and what was given."""


_USUAL = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})


def as_scalar(value: Any, name: str = "loss") -> Scalar:
    """A float, or a detached 0-D tensor on its own device. Raises `NotAScalar`.

    Tensors of one element, Python and numpy numbers are scalars, NaN and infinity included. Any other exception that
    a value raises when inspected becomes a `NotAScalar`.
    """
    if _is_usual(value):
        usual: torch.Tensor = value.detach()
        return usual
    try:
        return _scalar(value, name)
    except NotAScalar:
        raise
    except Exception as error:
        raise NotAScalar(f"{name} is of type {type(value).__name__}, which raises {type(error).__name__}") from error


def _is_usual(value: Any) -> bool:
    """Whether it is what nearly every loss is: a dense 0-D tensor of a common dtype."""
    return (
        type(value) is torch.Tensor and value.dim() == 0 and value.dtype in _USUAL
        and value.layout is torch.strided and not value.is_meta and not value.is_neg()
    )  # fmt: skip


def _scalar(value: Any, name: str) -> Scalar:
    if isinstance(value, torch.Tensor):
        return _tensor_scalar(value, name)
    if isinstance(value, np.ndarray | np.generic) and value.size == 1 and value.dtype.kind in "fiub":
        return float(value.reshape(()))
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError as error:
            raise NotAScalar(f"{name} is an integer beyond the range of a float") from error
    raise NotAScalar(f"{name} is {_describe(value)}; fp8watch wants one number: a 0-D tensor, a float, a numpy scalar")


def _tensor_scalar(value: torch.Tensor, name: str) -> torch.Tensor:
    if value.layout is not torch.strided or value.is_nested or value.is_quantized:
        raise NotAScalar(f"{name} is {_describe(value)}; fp8watch wants one number in a dense tensor")
    if value.numel() != 1 or value.is_complex() or value.device.type == "meta":
        raise NotAScalar(f"{name} is {_describe(value)}; fp8watch wants one number, for example {name}.mean()")
    placements = getattr(value, "placements", None)
    if placements is not None:
        if not all(placement.is_replicate() for placement in placements):
            raise NotAScalar(f"{name} is a DTensor with {placements}; fp8watch wants {name}.full_tensor()")
        value = value._local_tensor  # type: ignore[attr-defined]
    return value.detach().resolve_neg().reshape(())


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return f"a nested tensor, {value.dtype}, on {value.device}"
        layout = "" if value.layout is torch.strided else f"{str(value.layout).removeprefix('torch.')} "
        return f"a {layout}tensor of shape {tuple(value.shape)}, {value.dtype}, on {value.device}"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}, {value.dtype}"
    return "None" if value is None else f"of type {type(value).__name__}"


def micro_batches(values: list[Scalar]) -> dict[str, Scalar]:
    """`loss` (mean of the micro-batch losses) and, if there are several, `loss_micro_max` and `loss_micro_median` (the
    lower of the middle two), which show how far the batches of a step differ. NaN counts as the largest. Float32 on the
    first tensor's device, without waiting for it; plain floats if no value is a tensor."""
    if len(values) == 1:
        return {"loss": values[0]}
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if not tensors:
        losses = [float(value) for value in values]
        in_order = sorted(losses, key=lambda loss: (math.isnan(loss), loss))
        return {"loss": sum(losses) / len(losses)} | _spread(in_order)
    device = tensors[0].device
    parts = [
        value.to(device=device, dtype=torch.float32, non_blocking=True)
        if isinstance(value, torch.Tensor)
        else torch.full((), value, dtype=torch.float32, device=device)
        for value in values
    ]
    stacked = torch.stack(parts)
    # A sorted copy rather than `median`, which CUDA refuses when deterministic algorithms are required.
    return {"loss": stacked.mean()} | _spread(torch.sort(stacked).values)


def _spread(ordered: Sequence[float] | torch.Tensor) -> dict[str, Scalar]:
    return {"loss_micro_max": ordered[-1], "loss_micro_median": ordered[(len(ordered) - 1) // 2]}


def mean(values: list[Scalar]) -> Scalar:
    """Mean of micro-batch losses; see `micro_batches`."""
    return micro_batches(values)["loss"]


def is_given(name: str) -> bool:
    """Whether a scalar's value is given by the training loop."""
    return name in ("loss", "loss_micro_max", "loss_micro_median", "tokens") or name.partition(":")[0] in GIVEN


def as_rate(rate: Any) -> Scalar | None:
    """A learning rate as an optimizer holds it; None: the optimizer chooses its own."""
    if rate is None:
        return None
    return rate.detach().reshape(()) if isinstance(rate, torch.Tensor) else float(rate)


def as_flag(value: bool | torch.Tensor) -> Scalar:
    """1.0 or 0.0, or the flag as a 0-D tensor."""
    return value.reshape(()) if isinstance(value, torch.Tensor) else float(value)


class StepScalars:
    """Collects one step's scalars under the names of `fp8watch.records.StepFrame.scalars`."""

    def __init__(self) -> None:
        self.values: dict[str, Scalar] = {}
        """This step's values so far; write to it what is certainly a `Scalar`."""
        self._micro: list[Scalar] = []

    def put(self, name: str, value: Scalar | None) -> None:
        """Keep a value; None: not observed."""
        if value is not None:
            self.values[name] = value

    def give(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Keep values that the loop gives under the names of `GIVEN`: a scalar, or a mapping from modules to scalars,
        stored as `name:module`. Returns name -> reason for each value that was refused; the rest is kept."""
        refused: dict[str, str] = {}
        for name, value in values.items():
            if name not in GIVEN:
                refused[name] = f"watch.record takes {', '.join(GIVEN)}"
                continue
            parts = (
                {f"{name}:{key}": item for key, item in value.items()} if isinstance(value, Mapping) else {name: value}
            )
            for key, item in parts.items():
                try:
                    scalar = as_scalar(item, key)
                except NotAScalar as error:
                    refused[key] = str(error)
                else:
                    self.values[key] = scalar.clone() if isinstance(scalar, torch.Tensor) else scalar
        return refused

    def has(self, name: str) -> bool:
        """Whether this step has a value of that name so far."""
        return name in self.values

    def micro_loss(self, value: Any) -> None:
        """Add one micro-batch's loss; copied, since the trainer may reuse its memory. Raises `NotAScalar`."""
        scalar = as_scalar(value)
        self._micro.append(scalar.clone() if isinstance(scalar, torch.Tensor) else scalar)

    @property
    def num_micro_batches(self) -> int:
        """Losses added since the last step."""
        return len(self._micro)

    def loss(self, value: Any) -> None:
        """Set the step's loss: the mean of the micro-batch losses if any, else `value`. Raises `NotAScalar`."""
        if self._micro:
            micro, self._micro = self._micro, []
            self.values |= micro_batches(micro)
        elif value is not None:
            # Not detached: the step's tensors are taken without gradients, and let go, before training goes on.
            self.values["loss"] = value if _is_usual(value) else as_scalar(value)

    def take(self) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """The step's values, those on the host and those on a device. Starts the next step."""
        values, self.values = self.values, {}
        self._micro.clear()
        host: dict[str, float] = {}
        device: dict[str, torch.Tensor] = {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                device[name] = value
            else:
                host[name] = value
        return host, device
