"""The FP8 number formats: largest value, smallest normal, smallest subnormal.

Source: arXiv 2209.05433, table 1. The FNUZ variants (AMD MI300) differ in bias and maximum:
scaling by 448 on E4M3FNUZ overflows to NaN, so the format is always taken from the dtype at hand.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Format:
    """One FP8 format. `max` is the largest finite magnitude, the value an amax is scaled to."""

    name: str
    torch_dtype: str
    max: float
    min_normal: float
    min_subnormal: float
    mantissa_bits: int

    @property
    def underflow_ratio(self) -> float:
        """|x| / amax at or below which a value scaled to full range rounds to zero (ties go to even)."""
        return self.min_subnormal / 2 / self.max


E4M3 = Fp8Format(
    name="e4m3", torch_dtype="float8_e4m3fn", max=448.0, min_normal=2.0**-6, min_subnormal=2.0**-9, mantissa_bits=3
)
E5M2 = Fp8Format(
    name="e5m2", torch_dtype="float8_e5m2", max=57344.0, min_normal=2.0**-14, min_subnormal=2.0**-16, mantissa_bits=2
)
E4M3_FNUZ = Fp8Format(
    name="e4m3fnuz",
    torch_dtype="float8_e4m3fnuz",
    max=240.0,
    min_normal=2.0**-7,
    min_subnormal=2.0**-10,
    mantissa_bits=3,
)
E5M2_FNUZ = Fp8Format(
    name="e5m2fnuz",
    torch_dtype="float8_e5m2fnuz",
    max=57344.0,
    min_normal=2.0**-15,
    min_subnormal=2.0**-17,
    mantissa_bits=2,
)

FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2, E4M3_FNUZ, E5M2_FNUZ)}
