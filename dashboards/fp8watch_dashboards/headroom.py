"""Head-room of a tensor: the powers of two between its largest scaled value and the format's maximum."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fp8watch.detect.base import Sample
from fp8watch.formats import FORMATS
from fp8watch.records import TensorColumn

Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


def headroom_log2(amax: npt.NDArray[Any], scale: npt.NDArray[Any], fp8_max: npt.NDArray[Any]) -> Floats:
    """`log2(fp8_max / (amax * scale))`, elementwise, as float32.

    Negative if the cast clipped. An amax of 0 gives +inf (nothing to represent); an amax or scale that is not finite
    gives -inf (nothing can be represented). Never NaN for observed input.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        product = amax.astype(np.float64) * scale.astype(np.float64)
        result = np.log2(fp8_max / product)
    return np.where(np.isfinite(product), result, -np.inf).astype(np.float32)


def format_limits(tensors: tuple[TensorColumn, ...]) -> npt.NDArray[np.float64]:
    """Largest finite magnitude of every tensor's format; NaN for an unknown format."""
    return np.array([FORMATS[t.fp8_format].max if t.fp8_format in FORMATS else np.nan for t in tensors])


def sample_headroom(sample: Sample, limits: npt.NDArray[np.float64]) -> tuple[Floats, Mask]:
    """Head-room of every tensor (float32, NaN: not observed), and whether its module ran in BF16 in this step.

    `limits` is `format_limits(sample.tensors)`. Tensors of a module in BF16 were not cast and have no head-room.
    """
    num_tensors = len(sample.tensors)
    in_bf16 = np.zeros(num_tensors, dtype=np.bool_)
    if "high_precision" in sample.values:
        in_bf16 = (sample.values["high_precision"] != 0) & sample.valid["high_precision"]
    if not {"amax", "scale"} <= sample.values.keys():
        return np.full(num_tensors, np.nan, dtype=np.float32), in_bf16
    observed = sample.valid["amax"] & sample.valid["scale"] & ~in_bf16 & np.isfinite(limits)
    values = headroom_log2(sample.values["amax"], sample.values["scale"], limits)
    return np.where(observed, values, np.float32(np.nan)).astype(np.float32), in_bf16
