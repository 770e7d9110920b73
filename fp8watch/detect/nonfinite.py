"""nonfinite: a value that must be a number is not one.

Checks the raw loss, the gradient norm, every amax and scale, the parameter sample and the sampled counts of non-finite
elements. It needs no baseline and no warm-up: it fires in the step itself, also in the first, because a run may be bad
before training begins. NaN leaves no trace in an amax (kernels use fmax), so a finite amax does not prove finite data;
that is why loss, norm and counts are checked as well.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from fp8watch.detect.base import Sample, Symptom
from fp8watch.detect.given import given, module_of

SCALARS = ("loss", "grad_norm", "update_rms", "loss_scale")
COLUMNS = ("amax", "scale")
VANISHING = 2.0**-112
"""amax below which fp8_max / amax leaves the range of float32 (largest 2^128, largest fp8_max below 2^16)."""


class NonfiniteState(msgspec.Struct):
    """When the current stretch of non-finite steps began; None: the last step was finite."""

    onset_step: int | None = None


class Nonfinite:
    """Any non-finite observation is an act symptom at once."""

    name = "nonfinite"

    def start(self) -> NonfiniteState:
        """The state before any sample."""
        return NonfiniteState()

    def update(self, state: NonfiniteState, sample: Sample) -> tuple[NonfiniteState, list[Symptom]]:
        """Look at one step."""
        quantities: list[str] = []
        values: dict[str, str] = {}
        for name in SCALARS:
            value = sample.scalars.get(name)
            if value is not None and not math.isfinite(value):
                quantities.append(name)
                values[name] = str(value)
        before = _bad_before(sample)
        if before or sample.scalars.get("param_nonfinite", 0.0) > 0:
            quantities.append("parameters")
        hit = np.zeros(len(sample.tensors), dtype=np.bool_)
        counts: dict[str, int] = {}
        first: dict[str, Any] = {}
        for name in COLUMNS:
            bad = _observed(sample, name, lambda column: ~np.isfinite(column))
            if bad is not None and bad.any():
                quantities.append(name)
                hit |= bad
        bad = _observed(sample, "nonfinite", lambda column: column > 0)
        if bad is not None and bad.any():
            quantities.append("elements")
            hit |= bad
            where = _in_order(sample, bad)
            for index in where[:8]:
                counts[sample.tensors[index].name] = int(sample.values["nonfinite"][index])
            first = _first(sample, where[0])
        if not quantities:
            return NonfiniteState(), []
        onset = sample.step if state.onset_step is None else state.onset_step
        evidence: dict[str, Any] = {"quantities": quantities, "values": values, "is_first_step": sample.step <= 1}
        if before:
            evidence["bad_before_training"] = before
        if counts:
            evidence |= {"nonfinite_elements": counts, **first}
        if "scale" in quantities:
            evidence |= _scales(sample)
        symptom = Symptom(
            detector=self.name,
            severity="act",
            step=sample.step,
            onset_step=onset,
            tensors=tuple(int(i) for i in _in_order(sample, hit)),
            rank=_rank(sample, quantities),
            evidence=evidence,
        )
        return NonfiniteState(onset_step=onset), [symptom]


def _observed(sample: Sample, name: str, test: Any) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
    column = sample.values.get(name)
    if column is None:
        return None
    valid = sample.valid.get(name)
    found: np.ndarray[Any, np.dtype[np.bool_]] = test(column)
    return found if valid is None else found & valid


def _bad_before(sample: Sample) -> list[str] | int:
    """Parameters that were not finite before the first update: their names, or a count where the names are not known
    yet. They were loaded or created like that, so no training remedy helps."""
    names = [module_of(name) for name in given(sample, "bad_parameter")]
    return names or int(sample.scalars.get("bad_parameters", 0.0))


def _first(sample: Sample, index: int) -> dict[str, Any]:
    """Where the forward pass first held a non-finite value, in the model's order of modules, and how many tensors
    before it were counted and finite. Empty where only gradients are affected."""
    if sample.tensors[index].tensor.startswith("grad"):
        return {}
    counted = sample.valid.get("nonfinite", np.ones(len(sample.tensors), dtype=np.bool_))
    before = sum(bool(counted[i]) and not sample.tensors[i].tensor.startswith("grad") for i in range(index))
    return {"first_nonfinite": sample.tensors[index].name, "finite_casts_before": before}


def _scales(sample: Sample) -> dict[str, Any]:
    """The tensors whose scale is not finite, and what their amax says about the reason. A vanishing amax makes an
    infinite scale (fp8_max / amax overflows): rows of zeros, or a tensor that is nearly zero. That is not an
    overflow."""
    bad = _observed(sample, "scale", lambda column: ~np.isfinite(column))
    assert bad is not None
    names = [sample.tensors[int(i)].name for i in np.flatnonzero(bad)[:8]]
    amax, seen = sample.values.get("amax"), sample.valid.get("amax")
    if amax is None:
        return {"nonfinite_scale": names}
    known = bad if seen is None else bad & seen
    vanishing = [sample.tensors[int(i)].name for i in np.flatnonzero(known & (np.abs(amax) < VANISHING))[:8]]
    return {"nonfinite_scale": names} | ({"vanishing_amax": vanishing} if vanishing else {})


def _in_order(sample: Sample, hit: np.ndarray[Any, np.dtype[np.bool_]]) -> list[int]:
    """Forward tensors first: a gradient is non-finite because something before it was."""
    indices = [int(i) for i in np.flatnonzero(hit)]
    return sorted(indices, key=lambda i: (sample.tensors[i].tensor.startswith("grad"), i))


def _rank(sample: Sample, quantities: list[str]) -> int | None:
    for name in quantities:
        if name in sample.rank_of_extreme:
            return sample.rank_of_extreme[name]
    return None
