"""From symptoms to a cause, by weighing the evidence of a window, for and against each.

No detector stands for a cause: a loss spike may come from a frozen scale, a learning rate, a batch or a flipped
bit. Each hypothesis below looks for its own traces in the window (`Context`), says what it found, and what speaks
against it; the one with most weight wins if it has at least `ENOUGH` and leads; else the cause is unknown. BF16
runs diverge too, so precision needs a precision trace of its own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fp8watch.detect.base import Symptom
from fp8watch.detect.context import Context
from fp8watch.detect.shadow_error import ACT, ORDINARY
from fp8watch.records import Cause

LOOK_BACK = 32
"""Samples before the onset in which a cause may show."""
ENOUGH = 2.0
"""Weight a cause must have."""
UPDATE_BOUND = 100.0
"""No element moves further than this many RMS of the update (Adam's largest step is about 10 of them)."""


@dataclass(slots=True)
class Case:
    """The case for one cause: weight, and the reasons in words."""

    cause: Cause
    weight: float = 0.0
    support: list[str] = field(default_factory=list)
    against: list[str] = field(default_factory=list)

    def speaks_for(self, weight: float, reason: str) -> None:
        """Evidence for it."""
        self.weight += weight
        self.support.append(reason)

    def speaks_against(self, weight: float, reason: str) -> None:
        """Evidence against it."""
        self.weight -= weight
        self.against.append(reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """The verdict and how it came about."""

    cause: Cause
    evidence: dict[str, Any]


def attribute(symptom: Symptom, context: Context, modules: Sequence[str] = ()) -> Attribution:
    """The cause of a symptom of these modules; the context holds the symptom's own step already."""
    since = symptom.onset_step - LOOK_BACK * context.stride()
    cases = [
        _bookkeeping(symptom, context, since),
        _hardware(symptom, context, since),
        _optimisation(symptom, context, since),
        _precision(symptom, context, since, modules),
        _data(symptom, context, since),
    ]
    ranked = sorted(cases, key=lambda case: -case.weight)
    best, second = ranked[0], ranked[1]
    is_clear = best.weight >= ENOUGH and best.weight > second.weight
    cause: Cause = best.cause if is_clear else "unknown"
    evidence: dict[str, Any] = {
        "for": best.support if is_clear else [],
        "against": best.against if is_clear else [],
        "other_causes": {
            case.cause: {"weight": round(case.weight, 1), "for": case.support, "against": case.against}
            for case in ranked
            if (case.support or case.against) and (case is not best or not is_clear)
        },
    }
    return Attribution(cause=cause, evidence=evidence)


def _bookkeeping(symptom: Symptom, context: Context, since: int) -> Case:
    case = Case("bookkeeping")
    frozen = context.find("scale_frozen", since=since)
    if frozen is not None:
        bits = frozen.evidence.get("deviation_log2", 0.0)
        poisoned = frozen.evidence.get("poisoned")
        reason = f"scales differ from what the amax window demands by 2^{bits:g}"
        case.speaks_for(5.0, f"a non-finite amax blocks the window of {poisoned[0]}" if poisoned else reason)
        if frozen.onset_step > symptom.onset_step + 2 * context.stride():
            case.speaks_against(3.0, "the scales went wrong after the symptom began")
    elif symptom.detector in ("saturation", "underflow"):
        case.speaks_against(1.0, "every scale is the one that its amax window demands")
    apart = context.find("rank_mismatch", since=since)
    if apart is not None and apart.evidence["of"] == "scale_checksum" and not apart.evidence["is_one_rank"]:
        case.speaks_for(5.0, f"ranks {apart.evidence['ranks']} use other scales than the ranks they belong with")
    return case


def _hardware(symptom: Symptom, context: Context, since: int) -> Case:
    case = Case("hardware")
    jump = context.find("amax_jump", "act", since=since)
    if jump is not None:
        moved = context.series("update_rms", jump.onset_step - 8 * context.stride(), jump.onset_step)
        distance = jump.evidence["amax"] - jump.evidence["ordinary_amax"]
        reason = f"a weight's amax grew by 2^{jump.evidence['jump_log2']:g} in one step"
        if moved and distance > UPDATE_BOUND * max(moved):
            case.speaks_for(6.0, f"{reason}, {distance / max(moved):.3g} times the RMS of any update near it")
        elif moved:
            case.speaks_for(1.0, reason)
            case.speaks_against(1.0, "updates near it were large enough to move it")
        else:
            case.speaks_for(3.0, reason)
    apart = context.find("rank_mismatch", since=since)
    if apart is not None:
        ranks, what = apart.evidence["ranks"], apart.evidence["of"].partition("_")[0]
        word = {"param": "parameters", "scale": "scales"}[what]
        if apart.evidence["is_one_rank"]:
            case.speaks_for(6.0, f"rank {ranks[0]} alone holds other {word} than its replicas")
        elif what == "param":
            case.speaks_for(2.5, f"ranks {ranks} hold other parameters than their replicas")
    alone = _single_rank(symptom, context)
    if alone:
        case.speaks_for(1.0 if symptom.detector == "loss_spike" else 2.5, alone)
    elif context.num_ranks > 1 and symptom.rank is not None and symptom.detector == "nonfinite":
        case.speaks_for(1.0, f"rank {symptom.rank} alone")
    elif context.num_ranks > 2 and symptom.detector in ("loss_spike", "grad_spike", "nonfinite"):
        case.speaks_against(0.5, "most ranks are out of range alike")
    return case


def _single_rank(symptom: Symptom, context: Context) -> str:
    """Which quantity is out of range on few ranks only, in words; empty: none, or not known."""
    names = {"loss_spike": ("loss",), "grad_spike": ("grad_norm",), "nonfinite": ("loss", "grad_norm", "update_rms")}
    for name in names.get(symptom.detector, ()):
        if context.is_one_rank(name):
            who = "one rank" if symptom.rank is None else f"rank {symptom.rank}"
            return f"{name} is out of range on {who} only, the median of {context.num_ranks} ranks is ordinary"
    return ""


def _optimisation(symptom: Symptom, context: Context, since: int) -> Case:
    case = Case("optimisation")
    stride = context.stride()
    rate_jump = next(
        (s for s in reversed(context.seen) if s.detector == "update_rms" and "learning_rate_ratio" in s.evidence), None
    )
    if rate_jump is not None and rate_jump.step >= since and rate_jump.onset_step <= symptom.onset_step + stride:
        ratio = rate_jump.evidence["learning_rate_ratio"]
        by = "from zero" if ratio is None else f"by {ratio:.3g}x"
        case.speaks_for(4.5, f"the learning rate jumped {by} at step {rate_jump.onset_step}")
    moved = next((s for s in reversed(context.seen) if "update_ratio" in s.evidence), None)
    if moved is not None and moved.step >= since and moved.onset_step <= symptom.onset_step + stride:
        share = moved.evidence["update_ratio"]
        case.speaks_for(4.0, f"each update moved the parameters by {share:.1%} of their own size")
    before = context.series("update_rms", symptom.onset_step - 8 * stride, symptom.onset_step - 1)
    earlier = context.series("update_rms", 0, symptom.onset_step - 9 * stride)
    if before and len(earlier) >= 8 and max(before) > 2.0 * statistics.median(earlier):
        case.speaks_for(2.0, f"updates before the onset were {max(before) / statistics.median(earlier):.2g}x the usual")
    rates = context.series("learning_rate", since, symptom.onset_step)
    if len(rates) >= 4 and rates[-1] > 1.05 * rates[0]:
        case.speaks_for(2.0, "the learning rate was rising when it began")
    if _is_growing(context.series("grad_norm", symptom.onset_step - 16 * stride, symptom.onset_step)):
        case.speaks_for(1.5, "the gradient norm grew steadily before the onset")
    logits = context.find("attention_logit", since=since)
    if logits is not None:
        case.speaks_for(2.5, f"attention logits of {logits.evidence['attention_logit']:.3g} make the softmax one-hot")
    if symptom.evidence.get("is_recurring"):
        case.speaks_for(3.0, f"{symptom.evidence['bursts']} bursts of the gradient norm, ordinary in between")
    return case


def _precision(symptom: Symptom, context: Context, since: int, modules: Sequence[str]) -> Case:
    case = _precision_traces(symptom, context, since)
    alone = _single_rank(symptom, context)
    if alone:
        case.speaks_against(3.0, f"{alone}: the format is the same on all")
    probes = [probe for probe in context.probes if probe.step >= symptom.onset_step]
    own = [probe for probe in probes if probe.module in modules] or probes
    if not own:
        return case
    worst = max(own, key=lambda probe: math.inf if math.isnan(probe.error) else probe.error)
    if worst.error <= ORDINARY:
        case.speaks_against(
            4.0, f"the FP8 GEMM of {worst.module} is within {worst.error:.1%} of BF16, as its format always is"
        )
    elif not worst.error <= ACT and context.find("scale_frozen", "act", since=since) is None:
        case.speaks_for(3.5, f"the FP8 GEMM of {worst.module} is {worst.error:.1%} off the same in BF16")
    return case


def _precision_traces(symptom: Symptom, context: Context, since: int) -> Case:
    case = Case("precision")
    stride = context.stride()
    for detector, word in (("saturation", "clips"), ("underflow", "loses elements to zero")):
        seen = context.find(detector, "act", since=max(since, symptom.onset_step - 2 * stride))
        if seen is None:
            continue
        if seen.onset_step <= symptom.onset_step + 2 * stride:
            case.speaks_for(1.0 if case.support else 3.0, f"FP8 {word} persistently since step {seen.onset_step}")
        else:
            case.speaks_against(0.5, f"FP8 {word} only since step {seen.onset_step}, after the onset")
    if not case.support:
        if context.find("saturation", since=since) is None:
            case.speaks_against(1.0, "no cast clips or underflows beyond the ordinary")
        return case
    for detector, why in (
        ("scale_frozen", "the scales are not the ones that the amax demands"),
        ("update_rms", "updates out of all proportion came before"),
    ):
        earlier = context.find(detector, "act", since=since)
        if earlier is not None and earlier.onset_step <= symptom.onset_step + 2 * stride:
            case.speaks_against(case.weight, f"{why}: clipping and underflow follow from it")
            break
    return case


def _data(symptom: Symptom, context: Context, since: int) -> Case:
    case = Case("data")
    if symptom.detector not in ("loss_spike", "grad_spike") or symptom.evidence.get("is_recurring"):
        return case
    stride = context.stride()
    before = context.series("loss", symptom.onset_step - 8 * stride, symptom.onset_step - 1)
    at = context.series("loss", symptom.onset_step, symptom.onset_step + stride)
    if before and at:
        middle = statistics.median(before)
        spread = max(1e-3 * abs(middle), 1.4826 * statistics.median(abs(x - middle) for x in before))
        if at[0] - middle > 5 * spread:
            case.speaks_for(1.5, "the loss was ordinary until the step before")
        else:
            case.speaks_against(1.0, "the loss rose over several steps")
    moved = context.series("update_rms", symptom.onset_step - 3 * stride, symptom.onset_step - 1)
    earlier = context.series("update_rms", 0, symptom.onset_step - 4 * stride)
    if moved and len(earlier) >= 8:
        if max(moved) < 2.0 * statistics.median(earlier):
            case.speaks_for(1.5, "the updates before it were of ordinary size")
        else:
            case.speaks_against(2.0, "an unusually large update came before it")
    if context.find("amax_jump", "act", since=since) is not None:
        case.speaks_against(3.0, "a weight's amax jumped")
    if symptom.detector == "loss_spike" and context.is_one_rank("loss"):
        case.speaks_for(0.5, "the batch of one rank only")
    return case


def _is_growing(norms: list[float]) -> bool:
    """Whether the later half lies above the earlier by more than 1.5x, the last third still more."""
    if len(norms) < 6 or min(norms) <= 0:
        return False
    logs = [math.log(x) for x in norms]
    third = len(logs) // 3
    parts = [statistics.median(logs[i * third : (i + 1) * third]) for i in range(3)]
    return parts[0] < parts[1] < parts[2] and parts[2] - parts[0] > math.log(1.5)
