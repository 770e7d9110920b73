"""shadow_error: a layer's FP8 GEMM differs from the same GEMM in BF16 by more than its format explains.

The probe runs one layer's forward GEMM again in BF16 on the same input and gives ||y8 - y16|| / ||y16||. Casting to
E4M3 leaves each operand an SNR of 31.5 dB, so 3.7 % is ordinary. Warn above 6 % in two probes of a module in a row.
Acting needs 10 % in three in a row and no other explanation: where scales are wrong or a cast clips, the detectors for
that name the tensor, and the error follows from it. What remains is a kernel, a stale cached weight (transformer-engine
issue 1047: 0.068 to 1.7) or a device that computes wrongly.
Conversely, an ordinary probe is evidence against precision as the cause: see attribution.
Source: detector default D13, precursor P17.
"""

from __future__ import annotations

import msgspec
import numpy as np

from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.tensors import high_precision, observed

ORDINARY = 0.05
"""Largest ordinary error of a probe: E4M3 x E4M3 gives 3.7 %, a heavy-tailed input a little more."""
WARN, ACT = 0.06, 0.10
WARN_PROBES, ACT_PROBES = 2, 3
"""Probes of one module in a row."""


class Probes(msgspec.Struct):
    """The probes of one module."""

    over: int = 0
    bad: int = 0
    onset: int = -1
    last_step: int = -1
    error: float = 0.0


class ShadowErrorState(msgspec.Struct):
    """Tensor name -> its probes."""

    probes: dict[str, Probes] = {}


class ShadowError:
    """Relative error of probed FP8 GEMMs."""

    name = "shadow_error"
    of_tensors = True

    def start(self) -> ShadowErrorState:
        """The state before any sample."""
        return ShadowErrorState()

    def rolled_back(self, state: ShadowErrorState, step: int) -> ShadowErrorState:
        """The probes are undone."""
        return ShadowErrorState()

    def update(self, state: ShadowErrorState, sample: Sample) -> tuple[ShadowErrorState, list[Symptom]]:
        """Look at one step; steps without a probe are ignored."""
        column = observed(sample, "shadow_error")
        if column is None:
            return state, []
        hit: list[tuple[bool, float, int]] = []
        for row in np.flatnonzero(column[1] & ~high_precision(sample)):
            error, name = float(column[0][row]), sample.tensors[int(row)].name
            probes = state.probes.setdefault(name, Probes())
            probes.error, probes.last_step = error, sample.step
            # Any comparison with NaN is false, and an error that is not a number must count as the worst.
            is_over, is_bad = not error <= WARN, not error <= ACT
            probes.onset = (probes.onset if probes.over else sample.step) if is_over else -1
            probes.over = probes.over + 1 if is_over else 0
            probes.bad = probes.bad + 1 if is_bad else 0
            if probes.over >= WARN_PROBES:
                hit.append((probes.bad >= ACT_PROBES, error, int(row)))
        if not hit:
            return state, []
        hit.sort(key=lambda item: (not item[0], -item[1]))
        is_act, error, worst = hit[0]
        shown = [item for item in hit if item[0] or not is_act]
        return state, [
            Symptom(
                detector=self.name,
                severity="act" if is_act else "warn",
                step=sample.step,
                onset_step=min(state.probes[sample.tensors[row].name].onset for _, _, row in shown),
                tensors=tuple(row for _, _, row in shown),
                evidence={
                    "shadow_error": round(error, 5),
                    "ordinary_error": ORDINARY,
                    "probes_in_a_row": state.probes[sample.tensors[worst].name].over,
                },
            )
        ]
