"""Questions about the window around an onset, for attribution. The answers are yes, no, or unknown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from fp8watch.detect.base import Symptom
from fp8watch.detect.context import Context

MOST = 0.9
"""Share of a kind's tensors that counts as nearly all of them."""
SPREADS = 5.0
"""A point is ordinary within this many robust standard deviations of the points before it."""


def is_growing(norms: Sequence[float]) -> bool:
    """Whether the last third is more than 1.5x above the first, with the middle third in between."""
    if len(norms) < 6 or min(norms) <= 0:
        return False
    logs = [math.log(x) for x in norms]
    third = len(logs) // 3
    parts = [statistics.median(logs[i * third : (i + 1) * third]) for i in range(3)]
    return parts[0] < parts[1] < parts[2] and parts[2] - parts[0] > math.log(1.5)


def is_everywhere(symptom: Symptom, context: Context) -> bool:
    """Whether the gradients of (nearly) all layers leapt in the symptom's step: the loss itself sent them back so."""
    seen = context.find("amax_jump", since=symptom.step)
    if seen is None or not str(seen.evidence.get("kind", "")).startswith("grad"):
        return False
    total, jumped = seen.evidence.get("num_of_kind", 0), seen.evidence.get("num_jumped_of_kind", 0)
    return bool(total >= 2 and jumped >= MOST * total)


def is_loss_ordinary(symptom: Symptom, context: Context) -> bool | None:
    """Whether the loss of the symptom's own step is within the range of the losses before it; None: unknown."""
    stride = context.stride()
    before = context.series("loss", symptom.step - 32 * stride, symptom.step - 1)
    at = context.series("loss", symptom.step, symptom.step)
    if len(before) < 8 or not at:
        return None
    return _is_within(at[0], before)


def is_one_micro_batch(symptom: Symptom, context: Context) -> bool:
    """Whether, since the onset, one micro-batch had a loss out of range while the median of the step was ordinary.

    Of two micro-batches the median is the lower loss, so one of two counts.
    """
    stride = context.stride()
    before = context.series("loss_micro_median", symptom.onset_step - 32 * stride, symptom.onset_step - 1)
    tops = context.series("loss_micro_max", symptom.onset_step - 32 * stride, symptom.onset_step - 1)
    middle = context.series("loss_micro_median", symptom.onset_step, symptom.step)
    top = context.series("loss_micro_max", symptom.onset_step, symptom.step)
    if min(len(before), len(tops)) < 8 or not middle or not top:
        return False
    return all(_is_within(value, before) for value in middle) and not _is_within(max(top), tops)


def _is_within(value: float, before: Sequence[float]) -> bool:
    middle = statistics.median(before)
    spread = max(1e-3 * abs(middle), 1.4826 * statistics.median(abs(x - middle) for x in before))
    return value - middle <= SPREADS * spread
