"""Makes recorded frames small: fewer mantissa bits, element counts on fewer steps, and no column that nobody reads.

The rounding is well below what any detector can tell apart (see each constant). The recorder checks that the rounded
run has the findings of the exact one, and says where it has not.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
import numpy.typing as npt

from fp8watch import columns
from fp8watch.records import StepFrame

MANTISSA_BITS = {"amax": 12, "amax_last": 12, "scale": 14, "snr": 8}
"""amax: 1.2e-4, a tenth of the 1e-3 within which a scale is compared with its window; snr: 0.06 dB at 31 dB."""
COUNT_BITS = 8
"""Significant bits of saturated and underflowed: 0.2 %."""
SCALAR_BITS = {"step_seconds": 8, "update_rms": 14, "update_ratio": 14}
DROPPED_SCALARS = frozenset({"overhead_seconds"})
DROPPED_COLUMNS = frozenset({"mse"})
"""Follows from snr and amax closely enough."""
COUNTED = frozenset({"quantized", "saturated", "underflowed", "nonfinite", "snr"})
EVERY = 4
"""Element counts are kept on one step in this many, as on a machine that samples, ..."""
BEFORE, AFTER = 8, 400
"""... and on all steps from `BEFORE` ahead of the fault to `AFTER` behind it."""


def rounded(frame: StepFrame, fault_step: int | None) -> StepFrame:
    """The frame as it is stored."""
    is_near = fault_step is not None and fault_step - BEFORE <= frame.step <= fault_step + AFTER
    kept = {}
    for name, column in frame.columns.items():
        if name in DROPPED_COLUMNS or (name in COUNTED and not is_near and frame.step % EVERY):
            continue
        if name == "amax_last" and column == frame.columns["amax"]:
            continue  # absent: equal to amax
        values, valid = columns.unpack(column)
        if name in MANTISSA_BITS:
            values = round_floats(values, MANTISSA_BITS[name])
        elif name in ("saturated", "underflowed"):
            values = round_counts(values)
        kept[name] = columns.pack(values, column.dtype, None if valid.all() else valid)
    scalars = {
        name: _round_scalar(value, SCALAR_BITS.get(name, 24))
        for name, value in frame.scalars.items()
        if name not in DROPPED_SCALARS
    }
    return msgspec.structs.replace(frame, columns=kept, scalars=scalars, time_unix=0.0)


def round_floats(values: npt.NDArray[np.float32], bits: int) -> npt.NDArray[np.float32]:
    """To `bits` of mantissa, nearest; what is not finite or zero stays."""
    with np.errstate(all="ignore"):
        mantissa, exponent = np.frexp(values)
        near = np.ldexp(np.round(mantissa * 2.0**bits) / 2.0**bits, exponent).astype(np.float32)
    result: npt.NDArray[np.float32] = np.where(np.isfinite(values) & np.isfinite(near), near, values)
    return result


def round_counts(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """To `COUNT_BITS` significant bits; small counts are exact."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    near: npt.NDArray[np.uint64] = np.ldexp(np.round(mantissa * 2.0**COUNT_BITS) / 2.0**COUNT_BITS, exponent).astype(
        np.uint64
    )
    return near


def _round_scalar(value: float, bits: int) -> float:
    if not math.isfinite(value) or value == 0.0 or value == int(value):
        return value
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 2.0**bits) / 2.0**bits, exponent)
