"""Checks of the arguments of `fp8watch.emulation`. Messages name the argument, what is wanted and what was given.

They raise `TypeError` for a wrong type, `ValueError` for a value that is out of bounds or unknown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch.distributed as dist
from torch import nn


def of_kind(name: str, value: Any, kind: type | tuple[type, ...], wanted: str) -> None:
    """An instance of `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: {wanted} is wanted, got {_shown(value)}")


def number(name: str, value: Any, least: float, most: float) -> None:
    """A finite number within bounds, both included."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: a number is wanted, got {_shown(value)}")
    if not math.isfinite(value) or not least <= float(value) <= most:
        raise ValueError(f"{name}: from {least:g} to {most:g} is wanted, got {value}")


def whole(name: str, value: Any, least: int, most: int) -> None:
    """A whole number within bounds, both included."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: a whole number is wanted, got {_shown(value)}")
    if not least <= int(value) <= most:
        raise ValueError(f"{name}: from {least} to {most} is wanted, got {value}")


def one_of(name: str, value: Any, known: Sequence[str]) -> None:
    """One of these names."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name}: {' or '.join(map(repr, known))} is wanted, got {_shown(value)}")


def function(name: str, value: Any, signature: str) -> None:
    """A callable that is not a class; `signature` describes it in words."""
    if isinstance(value, type) or not callable(value):
        raise TypeError(f"{name}: a function {signature} is wanted, got {_shown(value)}")


def module(name: str, value: Any) -> None:
    """A model, not its class."""
    of_kind(name, value, nn.Module, "a torch.nn.Module")


def group(name: str, value: Any) -> None:
    """A process group, or None."""
    if value is None or (dist.is_available() and isinstance(value, dist.ProcessGroup)):
        return
    raise TypeError(f"{name}: a process group of torch.distributed is wanted, or None, got {_shown(value)}")


def layer(name: str, linear: nn.Linear) -> str | None:
    """Why a linear layer can never run in FP8, or None if it can."""
    if linear.in_features < 1 or linear.out_features < 1:
        return f"{name}: {linear.out_features} x {linear.in_features}: there is nothing to multiply"
    if not linear.weight.dtype.is_floating_point:
        return f"{name}: weights of {linear.weight.dtype}: floating point is wanted"
    return None


def _shown(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    text = repr(value) if isinstance(value, bool | int | float | str) else ""
    kind = type(value).__name__
    return f"{kind} {text}" if text and len(text) <= 60 else kind
