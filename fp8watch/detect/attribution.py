"""From symptoms to a cause, by weighing the evidence of a window for and against each hypothesis.

No detector implies a cause: a loss spike may come from a frozen scale, a learning rate, a batch or a flipped bit. Each
hypothesis below looks for its own traces in the window (`Context`) and records what supports it and what contradicts
it. The heaviest wins if it weighs at least `ENOUGH` and is ahead of the others; otherwise the cause is unknown. BF16
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
from fp8watch.detect.window import is_everywhere, is_growing, is_loss_ordinary, is_one_micro_batch
from fp8watch.records import Cause

LOOK_BACK = 32
"""Samples before the onset in which traces of a cause may lie."""
ENOUGH = 2.0
"""Smallest weight of a cause that is named."""
LOOSE_LIMIT = 10.0
"""A clip limit of this many times the ordinary gradient norm or more limits nothing."""
UPDATE_BOUND = 100.0
"""No element moves further than this many times the RMS of the update (Adam's largest step is about 10)."""


@dataclass(slots=True)
class Case:
    """The case for one cause: weight, and the reasons in words."""

    cause: Cause
    weight: float = 0.0
    support: list[str] = field(default_factory=list)
    against: list[str] = field(default_factory=list)

    def speaks_for(self, weight: float, reason: str) -> None:
        """Add evidence for the cause."""
        self.weight += weight
        self.support.append(reason)

    def speaks_against(self, weight: float, reason: str) -> None:
        """Add evidence against the cause."""
        self.weight -= weight
        self.against.append(reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """The cause that was named, and the evidence for and against it."""

    cause: Cause
    evidence: dict[str, Any]


def attribute(symptom: Symptom, context: Context, modules: Sequence[str] = ()) -> Attribution:
    """The cause of a symptom of these modules. The context must already hold the symptom's own step."""
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
    elif symptom.detector in ("saturation", "underflow", "underflow_drift"):
        case.speaks_against(1.0, "every scale is the one that its amax window demands")
    if symptom.evidence.get("vanishing_amax"):
        names = ", ".join(symptom.evidence["vanishing_amax"][:3])
        case.speaks_for(3.0, f"the scale of {names} has no floor: rows of zeros, or nearly, made it infinite")
    apart = context.find("rank_mismatch", since=since)
    if apart is not None and apart.evidence.get("is_declared"):
        what = {"scale_checksum": "scales", "precision_checksum": "precisions"}[apart.evidence["of"]]
        case.speaks_for(5.0, f"ranks {apart.evidence['ranks']} share tensors and use different {what}")
    elif apart is not None and apart.evidence["of"] == "scale_checksum" and not apart.evidence["is_one_rank"]:
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
        word = {"param": "parameters", "scale": "scales", "precision": "precisions"}[what]
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
    if symptom.detector == "grad_spike" and is_everywhere(symptom, context):
        case.speaks_against(1.0, "the gradients of all layers grew alike: they came so from the loss")
    return case


def _single_rank(symptom: Symptom, context: Context) -> str:
    """Which quantity is out of range on few ranks only, in words; empty: none, or unknown."""
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
        if rate_jump.evidence.get("is_creeping"):
            reason = (
                f"the learning rate has climbed {by} above all it had settled at, since step {rate_jump.onset_step}"
            )
            case.speaks_for(4.5, reason)
        else:
            case.speaks_for(4.5, f"the learning rate jumped {by} at step {rate_jump.onset_step}")
    leap = next((s for s in reversed(context.seen) if "update_leap_ratio" in s.evidence), None)
    if leap is not None and leap.step >= since and leap.onset_step <= symptom.onset_step + stride:
        times = leap.evidence["update_leap_ratio"]
        reason = f"an update of {times:.3g}x the usual size from an ordinary gradient at an ordinary rate"
        case.speaks_for(4.0, f"{reason}: the optimizer's state is not what it was")
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
    if is_growing(context.series("grad_norm", symptom.onset_step - 16 * stride, symptom.onset_step)):
        case.speaks_for(1.5, "the gradient norm grew steadily before the onset")
    logits = context.find("attention_logit", since=since)
    if logits is not None:
        case.speaks_for(2.5, f"attention logits of {logits.evidence['attention_logit']:.3g} make the softmax one-hot")
    if symptom.evidence.get("is_recurring"):
        case.speaks_for(3.0, f"{symptom.evidence['bursts']} bursts of the gradient norm, ordinary in between")
    elif symptom.detector == "grad_spike":
        _loose_limit(case, symptom, context)
    return case


def _loose_limit(case: Case, symptom: Symptom, context: Context) -> None:
    """A burst that passed the clip limit, under an ordinary loss, in every layer alike. It came with the gradient of
    the loss, so neither a layer's format nor a device made it, and the limit that should have caught it is too high."""
    norm, ordinary = symptom.evidence["grad_norm"], symptom.evidence["ordinary_grad_norm"]
    limit = symptom.evidence.get("clip_limit")
    if limit is None or norm > limit or limit < LOOSE_LIMIT * ordinary:
        return
    if not is_everywhere(symptom, context) or is_loss_ordinary(symptom, context) is not True:
        return
    times = f"{norm / ordinary:.3g}x the ordinary norm"
    case.speaks_for(2.5, f"a burst of {times} passed the clip limit, which is {limit / ordinary:.3g}x that norm")


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
    for detector, word in (
        ("saturation", "clips"),
        ("underflow", "loses elements to zero"),
        ("underflow_drift", "loses more and more elements to zero"),
    ):
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
    if symptom.detector == "nonfinite" and symptom.evidence.get("finite_casts_before"):
        casts, where = symptom.evidence["finite_casts_before"], symptom.evidence["first_nonfinite"]
        case.speaks_against(1.5, f"{casts} tensors of the forward before {where} were finite: the batch is")
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
    if symptom.detector == "loss_spike" and is_one_micro_batch(symptom, context):
        case.speaks_for(1.5, "one micro-batch only: the median of the step's micro-batches is ordinary")
    return case
