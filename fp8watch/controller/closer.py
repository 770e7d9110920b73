"""Closer looks at tensors: what the controller has learnt from them, and what it asks the ranks to look at next.

What-if figures and shadow probes arrive now and then by themselves. When precision may be to blame for a finding, the
controller also asks for the layers that it names, once per incident; the answer is evidence for the policy a few steps
later. An inquiry changes nothing in training, so it needs neither vote nor signature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from fp8watch import what_if
from fp8watch.detect.base import Sample
from fp8watch.formats import FORMATS
from fp8watch.records import Finding, Inquiry
from fp8watch.what_if import CANDIDATES, Comparison, Loss

ASK_CAUSES = frozenset({"precision", "bookkeeping", "unknown"})
"""Causes for which a closer look can be informative."""
MAX_LAYERS = 8
"""Most layers in one inquiry: a fault in more of them is not about single tensors."""
MIN_STEPS_APART = 20
"""Steps between two inquiries: each costs the ranks a few casts and one GEMM per layer."""


class CloserLooks:
    """The closer looks of one run. Those of an abandoned timeline are forgotten."""

    def __init__(self) -> None:
        self._comparisons: dict[str, Comparison] = {}
        self._errors: dict[str, tuple[int, float]] = {}
        self._asked: set[str] = set()
        self._last_asked: int | None = None

    @property
    def comparisons(self) -> Mapping[str, Comparison]:
        """`module:tensor` -> its newest what-if figures."""
        return self._comparisons

    @property
    def shadow_errors(self) -> Mapping[str, tuple[int, float]]:
        """Module -> (step, relative error) of its newest shadow probe."""
        return self._errors

    def take(self, sample: Sample) -> None:
        """Keep the figures of a step."""
        if what_if.column(CANDIDATES[0], "snr") in sample.values:
            self._take_comparisons(sample)
        if "shadow_error" in sample.values:
            for i in np.flatnonzero(sample.valid["shadow_error"]):
                self._errors[sample.tensors[i].module] = (sample.step, float(sample.values["shadow_error"][i]))

    def _take_comparisons(self, sample: Sample) -> None:
        needed = ("quantized", "underflowed", "saturated", "snr", *what_if.COLUMNS)
        if any(name not in sample.values for name in needed):
            return
        usable = np.logical_and.reduce([sample.valid[name] for name in needed]) & (sample.values["quantized"] > 0)
        for i in np.flatnonzero(usable):
            tensor = sample.tensors[i]
            fmt = FORMATS.get(tensor.fp8_format)
            if fmt is None:
                continue
            elements = float(sample.values["quantized"][i])

            def loss(prefix: str, i: int = int(i), elements: float = elements) -> Loss:
                return Loss(
                    underflow=float(sample.values[f"{prefix}underflowed"][i]) / elements,
                    saturation=float(sample.values[f"{prefix}saturated"][i]) / elements,
                    snr_db=float(sample.values[f"{prefix}snr"][i]),
                )

            self._comparisons[tensor.name] = Comparison(
                step=sample.step, as_is=loss(""), under={name: loss(f"what_if_{name}_") for name in CANDIDATES}, fmt=fmt
            )

    def rewind(self) -> None:
        """Start a new timeline: its steps have the same numbers, and nothing is known of them."""
        self._comparisons, self._errors, self._last_asked = {}, {}, None
        self._asked.clear()

    def with_closer_look(self, finding: Finding, sample: Sample) -> Finding:
        """The finding with the closer looks at its worst tensor as evidence; where there was none since the onset, with
        what amax alone predicts."""
        if finding.tensor is None or finding.cause not in ASK_CAUSES:
            return finding
        known = self._comparisons.get(finding.tensor)
        extra: dict[str, object] = {}
        if known is not None and known.step >= finding.onset_step:
            extra["what_if"] = known.as_evidence()
        elif (predicted := self._predicted(finding.tensor, sample)) is not None:
            extra["what_if_predicted"] = predicted
        probed = self._errors.get(finding.layer or "")
        if probed is not None and probed[0] >= finding.onset_step:
            extra["shadow_error"] = float(f"{probed[1]:.3g}")
        return msgspec.structs.replace(finding, evidence={**finding.evidence, **extra}) if extra else finding

    def _predicted(self, name: str, sample: Sample) -> dict[str, object] | None:
        row = next((i for i, tensor in enumerate(sample.tensors) if tensor.name == name), None)
        if row is None or any(c not in sample.values or not sample.valid[c][row] for c in ("amax", "scale")):
            return None
        fmt = FORMATS.get(sample.tensors[row].fp8_format)
        if fmt is None:
            return None
        losses = what_if.predict(float(sample.values["amax"][row]), float(sample.values["scale"][row]), fmt)
        return {candidate: loss.as_evidence() for candidate, loss in losses.items()} or None

    def inquiry(self, run: str, attempt: int, findings: Sequence[Finding], *, seen: int) -> Inquiry | None:
        """What to ask after this step's findings; None: nothing."""
        if self._last_asked is not None and seen - self._last_asked < MIN_STEPS_APART:
            return None
        for finding in findings:
            is_new = finding.incident not in self._asked
            if is_new and finding.cause in ASK_CAUSES and finding.layers and len(finding.layers) <= MAX_LAYERS:
                self._asked.add(finding.incident)
                self._last_asked = seen
                return Inquiry(run=run, attempt=attempt, step=finding.step, modules=list(finding.layers))
        return None
