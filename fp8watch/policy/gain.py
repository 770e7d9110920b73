"""Whether a precision action has anything to gain, according to what-if figures and probes.

Only measurements since the trouble began count, and only when there is one for every tensor concerned: without them no
action is held back. A measurement that shows no gain does not prove that precision is not the cause (the next step may
differ), but it is reason enough to take the next rung first.
"""

from __future__ import annotations

from fp8watch.policy.rungs import Bf16Layers, RaiseMargin, Rung
from fp8watch.policy.view import Trouble, View
from fp8watch.what_if import Comparison


def judge(rung: Rung, view: View, trouble: Trouble) -> tuple[str | None, str]:
    """`(why not, remark)`: why to pass the rung over, or None and what speaks for it (empty: nothing is known)."""
    if not isinstance(rung, RaiseMargin | Bf16Layers) or not rung.if_what_if_helps or not trouble.tensors:
        return None, ""
    known = {name: view.what_if[name] for name in trouble.tensors if name in view.what_if}
    fresh = {name: found for name, found in known.items() if found.step >= trouble.onset_step}
    helped = [name for name, found in fresh.items() if _helps(rung, found)]
    if helped:
        return None, f"what-if: {_said(rung, fresh[helped[0]])} ({helped[0]}, step {fresh[helped[0]].step})"
    if len(fresh) < len(trouble.tensors):
        return None, ""
    worst = trouble.tensors[0]
    return f"what-if shows no gain: {_said(rung, fresh[worst])} ({worst}, step {fresh[worst].step})", ""


def _helps(rung: RaiseMargin | Bf16Layers, found: Comparison) -> bool:
    return found.margin_helps(rung.bits) if isinstance(rung, RaiseMargin) else found.bf16_helps()


def _said(rung: RaiseMargin | Bf16Layers, found: Comparison) -> str:
    now = found.as_is
    text = f"{now.underflow:.2%} underflow, {now.saturation:.2%} saturation, {now.snr_db:.1f} dB as it is"
    if isinstance(rung, RaiseMargin):
        under = found.under["margin_1" if rung.bits < 1.5 else "margin_2"]
        text += f"; {under.underflow:.2%}, {under.saturation:.2%}, {under.snr_db:.1f} dB with the margin"
    return text
