"""The FP8 number formats: largest value, smallest normal, smallest subnormal.

Source: arXiv 2209.05433, table 1. The FNUZ variants (AMD MI300) differ in bias and maximum: scaling by 448 on E4M3FNUZ
overflows to NaN, so the format is always taken from the dtype in use.
"""

from __future__ import annotations

import math
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

    @property
    def cast_snr_db(self) -> float:
        """Signal-to-noise ratio in dB of casting a normal tensor scaled to full range: that of an ordinary cast.

        31.5 with three mantissa bits, 25.6 with two, whatever the range (round to nearest, 2^22 samples). The closed
        form 20 log10(2^bits) + 10 log10(12 * 1.5 / ln 2), for mantissas spread evenly in the logarithm, gives 32.2 and
        26.1: a normal tensor has its power a little higher within each binade.
        """
        return {3: 31.5, 2: 25.6}[self.mantissa_bits]


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
MAX_MARGIN = 16.0
"""Powers of two, up or down. E4M3 has 17.8 between its largest number and its smallest (448 / 2^-9). With 16 of them as
head-room, a tensor's largest value is cast to 3.5 subnormal steps and most others to zero; with -16, everything within
16 powers of two of the largest saturates. Recipes use 0 to 4."""


def expected_gemm_error(first: Fp8Format, second: Fp8Format) -> float:
    """Relative error ||y_fp8 - y|| / ||y|| of a GEMM whose operands were cast to these formats, scaled to full range.

    The errors of the operands are independent, and each spreads over the output as its operand's power does, so their
    squares add: sqrt(10^(-snr/10) + 10^(-snr/10)). E4M3 x E4M3: 3.8 % (simulated: 3.7 %), E4M3 x E5M2: 5.9 %. The error
    of accumulation and of an output in BF16 (0.2 %) is negligible.
    """
    return math.sqrt(10.0 ** (-first.cast_snr_db / 10.0) + 10.0 ** (-second.cast_snr_db / 10.0))
