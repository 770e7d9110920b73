"""What a tensor would lose under another recipe: the candidates, what was counted, and what amax alone can tell.

Pure and without torch: `fp8watch.capture` counts, the controller reads, the policy asks before it acts. Nothing is
cast for it in training: a candidate is counted beside the cast that really is made.

| candidate | scale | format |
| --- | --- | --- |
| `margin_1`, `margin_2` | the one in force, halved once and twice | the tensor's |
| `current` | fp8_max / amax of this very tensor | the tensor's |
| `block` | a tile of 1x128: fp8_max / amax of the tile, rounded down to a power of two | E4M3 |
| `mxfp8` | a tile of 1x32: the same, a E8M0 scale rounded so that nothing clips | E4M3 |

Formats and power-of-two scales are the defaults of Transformer Engine 2.20's recipes (`Float8BlockScaling`,
`MXFP8BlockScaling`); that a rounding which can clip (OCP MX v1.0: floor) diverges is arXiv 2506.08027.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fp8watch.formats import E4M3, Fp8Format

CANDIDATES = ("margin_1", "margin_2", "current", "block", "mxfp8")
"""In the order of every array and column."""
MARGIN_OF = {"margin_1": 1.0, "margin_2": 2.0}
"""Candidate -> powers of two that it adds to the margin."""
TILE = {"block": 128, "mxfp8": 32}
"""Candidate -> neighbours along the last dimension that share a scale."""
FIGURES = {"underflowed": "u8", "saturated": "u8", "snr": "f4"}
"""What a frame holds of each candidate, with its dtype: element counts, and the signal to noise ratio in dB."""


def column(candidate: str, figure: str) -> str:
    """Name of a per-tensor column of a step frame."""
    return f"what_if_{candidate}_{figure}"


COLUMNS = {column(candidate, figure): dtype for candidate in CANDIDATES for figure, dtype in FIGURES.items()}
"""All of them with their dtype."""

GAUSS_CREST = 5.33
"""amax / sigma of 2^22 normal samples: what is assumed of a tensor of which only amax is known."""
TILE_CREST = {"block": 2.83, "mxfp8": 2.35}
"""The same for the 128 and 32 normal samples of a tile (expected maximum of |z|, from simulation)."""
SMALL_SHARE = 1e-3
"""A share of elements lost below which nothing is to be gained."""
SMALL_DB = 1.0
"""A change of the signal to noise ratio below which nothing is to be gained."""
ORDINARY_DB = 3.0
"""A cast this little below what its format gives a normal tensor is an ordinary one."""
ORDINARY_UNDERFLOW = 0.01
"""Share of elements rounded to zero that is no reason to leave FP8 (detector default D4: warn at 1 %)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What a cast does to a tensor, as shares of its elements and in dB."""

    underflow: float
    """Share that was not zero before and is after."""
    saturation: float
    """Share above the format's maximum after scaling."""
    snr_db: float
    """Signal to noise; infinite for a cast without error."""

    @property
    def lost(self) -> float:
        """Share of elements that the format could not hold."""
        return self.underflow + self.saturation

    def gains_over(self, other: Loss) -> bool:
        """Whether this is worth having instead of `other`: half of the lost elements, or a decibel."""
        fewer = other.lost - self.lost
        return (fewer > SMALL_SHARE and self.lost <= other.lost / 2) or self.snr_db > other.snr_db + SMALL_DB

    def is_ordinary(self, fmt: Fp8Format) -> bool:
        """Whether the cast does no more harm than the format always does: BF16 would gain nothing worth having."""
        return (
            self.saturation <= SMALL_SHARE
            and self.underflow <= ORDINARY_UNDERFLOW
            and self.snr_db >= fmt.cast_snr_db - ORDINARY_DB
        )

    def as_evidence(self) -> dict[str, float]:
        """Plain rounded numbers for a finding; the ratio is left out where it is no number."""
        values = {"underflow": _short(self.underflow), "saturation": _short(self.saturation)}
        return values | ({"snr_db": round(self.snr_db, 1)} if math.isfinite(self.snr_db) else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One tensor on one step: as it was cast, and what the candidates would have made of it."""

    step: int
    as_is: Loss
    under: dict[str, Loss]
    """Candidate -> loss."""
    fmt: Fp8Format

    def margin_helps(self, bits: float) -> bool:
        """Whether `bits` more of margin would gain something (the nearest candidate speaks for it)."""
        nearest = min(MARGIN_OF, key=lambda name: abs(MARGIN_OF[name] - bits))
        return self.under[nearest].gains_over(self.as_is)

    def bf16_helps(self) -> bool:
        """Whether leaving FP8 would gain something."""
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

    For tensors whose values are not at hand. The body is taken to be normal with `GAUSS_CREST`: then a share
    erf(t / sqrt 2) underflows, t = (half the smallest subnormal) / (scale sigma), and a share erfc(T / sqrt 2) is
    clipped, T = fp8_max / (scale sigma). The clipped power is 2 ((1 + T^2) Q(T) - T phi(T)). It gives the figures
    of simulated normal tensors: 27.0 dB and 0.75 % clipped at twice the amax that the scale was made for, 11.6 dB
    and 18 % at four times.
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
            # Half a bit of the range is lost on average to the power of two.
            losses[name] = _unclipped(E4M3.max / TILE_CREST[name] / math.sqrt(2.0), E4M3)
    return losses


def _normal(sigma: float, fmt: Fp8Format) -> Loss:
    """A normal tensor whose scaled values have this standard deviation."""
    top = fmt.max / sigma
    tail = math.erfc(top / math.sqrt(2.0))
    density = math.exp(-0.5 * top * top) / math.sqrt(2.0 * math.pi)
    clipped_power = max(0.0, (1.0 + top * top) * tail - 2.0 * top * density)
    base = _unclipped(sigma, fmt)
    noise = 10.0 ** (-base.snr_db / 10.0) + clipped_power
    return Loss(underflow=base.underflow, saturation=tail, snr_db=-10.0 * math.log10(noise))


def _unclipped(sigma: float, fmt: Fp8Format) -> Loss:
    bottom = fmt.min_subnormal / 2 / sigma
    # Below the smallest normal the error is that of a fixed step: step^2 / 12; above it that of the mantissa.
    step_power = fmt.min_subnormal**2 / 12.0 / (sigma * sigma)
    noise = 10.0 ** (-fmt.cast_snr_db / 10.0) + step_power
    return Loss(underflow=math.erf(bottom / math.sqrt(2.0)), saturation=0.0, snr_db=-10.0 * math.log10(min(noise, 1.0)))


def _short(value: float) -> float:
    return float(f"{value:.3g}")
