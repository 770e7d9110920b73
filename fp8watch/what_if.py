"""What a tensor would lose under another recipe: the candidates, the counted losses, and a prediction from amax alone.

Pure and without torch: `fp8watch.capture` counts, the controller reads, the policy asks before it acts. Training never
casts for it: a candidate is counted beside the real cast.

| candidate | scale | format |
| --- | --- | --- |
| `margin_1`, `margin_2` | the current scale, halved once and twice | the tensor's |
| `current` | fp8_max / amax of this tensor | the tensor's |
| `block` | per tile of 1x128: fp8_max / amax of the tile, rounded down to a power of two | E4M3 |
| `mxfp8` | per tile of 1x32: the same, an E8M0 scale rounded so that nothing clips | E4M3 |

Formats and power-of-two scales are the defaults of Transformer Engine 2.20's recipes (`Float8BlockScaling`,
`MXFP8BlockScaling`). A rounding that can clip (OCP MX v1.0: floor) diverges (arXiv 2506.08027).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fp8watch.formats import E4M3, Fp8Format

CANDIDATES = ("margin_1", "margin_2", "current", "block", "mxfp8")
"""In the order of all arrays and columns."""
MARGIN_OF = {"margin_1": 1.0, "margin_2": 2.0}
"""Candidate -> powers of two that it adds to the margin."""
TILE = {"block": 128, "mxfp8": 32}
"""Candidate -> number of neighbours along the last dimension that share a scale."""
FIGURES = {"underflowed": "u8", "saturated": "u8", "snr": "f4"}
"""A frame's figures of each candidate -> dtype: element counts, and the signal-to-noise ratio in dB."""


def column(candidate: str, figure: str) -> str:
    """Name of a per-tensor column of a step frame."""
    return f"what_if_{candidate}_{figure}"


COLUMNS = {column(candidate, figure): dtype for candidate in CANDIDATES for figure, dtype in FIGURES.items()}
"""All these columns -> dtype."""

GAUSS_CREST = 5.33
"""amax / sigma of 2^22 normal samples, assumed for a tensor of which only amax is known."""
TILE_CREST = {"block": 2.83, "mxfp8": 2.35}
"""The same for the 128 and 32 normal samples of a tile (expected maximum of |z|, from simulation)."""
SMALL_SHARE = 1e-3
"""Saving no more than this share of elements is no gain."""
SMALL_DB = 1.0
"""Improving the signal-to-noise ratio by no more than this is no gain."""
ORDINARY_DB = 3.0
"""A cast is ordinary if its signal-to-noise ratio is at most this far below that of a normal tensor in its format."""
ORDINARY_UNDERFLOW = 0.01
"""Largest share of elements rounded to zero that is no reason to leave FP8 (detector default D4: warn at 1 %)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What a cast does to a tensor, as shares of its elements and in dB."""

    underflow: float
    """Share that was not zero before the cast and is zero after it."""
    saturation: float
    """Share above the format's maximum after scaling."""
    snr_db: float
    """Signal-to-noise ratio; infinite for a cast without error."""

    @property
    def lost(self) -> float:
        """Share of elements that the format could not hold."""
        return self.underflow + self.saturation

    def gains_over(self, other: Loss) -> bool:
        """Whether this is a real gain over `other`: at most half of its lost elements, or a decibel more."""
        fewer = other.lost - self.lost
        return (fewer > SMALL_SHARE and self.lost <= other.lost / 2) or self.snr_db > other.snr_db + SMALL_DB

    def is_ordinary(self, fmt: Fp8Format) -> bool:
        """Whether the cast does no more harm than its format always does, so that BF16 would be no real gain."""
        return (
            self.saturation <= SMALL_SHARE
            and self.underflow <= ORDINARY_UNDERFLOW
            and self.snr_db >= fmt.cast_snr_db - ORDINARY_DB
        )

    def as_evidence(self) -> dict[str, float]:
        """Plain rounded numbers for a finding, without the ratio if it is not finite."""
        values = {"underflow": _short(self.underflow), "saturation": _short(self.saturation)}
        return values | ({"snr_db": round(self.snr_db, 1)} if math.isfinite(self.snr_db) else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One tensor in one step: the loss of the real cast, and the losses under the candidates."""

    step: int
    as_is: Loss
    under: dict[str, Loss]
    """Candidate -> loss."""
    fmt: Fp8Format

    def margin_helps(self, bits: float) -> bool:
        """Whether `bits` more margin would be a gain, judged by the nearest candidate."""
        nearest = min(MARGIN_OF, key=lambda name: abs(MARGIN_OF[name] - bits))
        return self.under[nearest].gains_over(self.as_is)

    def bf16_helps(self) -> bool:
        """Whether leaving FP8 would be a gain."""
        return not self.as_is.is_ordinary(self.fmt)

    def as_evidence(self) -> dict[str, object]:
        """For a finding or the reason of an action."""
        return {
            "step": self.step,
            "as_is": self.as_is.as_evidence(),
            **{name: loss.as_evidence() for name, loss in self.under.items()},
        }


def predict(amax: float, scale: float, fmt: Fp8Format) -> dict[str, Loss]:
    """`as_is` and all candidates, for a normal tensor of this amax cast with this scale; empty without a usable amax.

    For tensors whose values are not available. They are assumed to be normal with `GAUSS_CREST`. Then a share
    erf(t / sqrt 2) underflows, t = (half the smallest subnormal) / (scale sigma), and a share erfc(T / sqrt 2) is
    clipped, T = fp8_max / (scale sigma). The clipped power is 2 ((1 + T^2) Q(T) - T phi(T)). This agrees with
    simulated normal tensors: 27.0 dB and 0.75 % clipped at twice the amax that the scale was made for, 11.6 dB and
    18 % at four times.
    """
    if not (math.isfinite(amax) and math.isfinite(scale) and amax > 0 and scale > 0):
        return {}
    sigma = amax / GAUSS_CREST
    losses = {"as_is": _normal(sigma * scale, fmt)}
    for name in CANDIDATES:
        if name in MARGIN_OF:
            losses[name] = _normal(sigma * scale * 2.0 ** -MARGIN_OF[name], fmt)
        elif name == "current":
            losses[name] = _normal(fmt.max / GAUSS_CREST, fmt)
        else:
            # Rounding to a power of two loses half a bit of the range on average.
            losses[name] = _unclipped(E4M3.max / TILE_CREST[name] / math.sqrt(2.0), E4M3)
    return losses


def _normal(sigma: float, fmt: Fp8Format) -> Loss:
    """Loss of a normal tensor whose scaled values have this standard deviation."""
    top = fmt.max / sigma
    tail = math.erfc(top / math.sqrt(2.0))
    density = math.exp(-0.5 * top * top) / math.sqrt(2.0 * math.pi)
    clipped_power = max(0.0, (1.0 + top * top) * tail - 2.0 * top * density)
    base = _unclipped(sigma, fmt)
    noise = 10.0 ** (-base.snr_db / 10.0) + clipped_power
    return Loss(underflow=base.underflow, saturation=tail, snr_db=-10.0 * math.log10(noise))


def _unclipped(sigma: float, fmt: Fp8Format) -> Loss:
    bottom = fmt.min_subnormal / 2 / sigma
    # Below the smallest normal the error is that of a fixed step, step^2 / 12; above it, that of the mantissa.
    step_power = fmt.min_subnormal**2 / 12.0 / (sigma * sigma)
    noise = 10.0 ** (-fmt.cast_snr_db / 10.0) + step_power
    return Loss(underflow=math.erf(bottom / math.sqrt(2.0)), saturation=0.0, snr_db=-10.0 * math.log10(min(noise, 1.0)))


def _short(value: float) -> float:
    return float(f"{value:.3g}")
