"""What is not a number, in a few words: the same in tables of a replay, stories and the demo."""

from __future__ import annotations

from typing import Any

FIRST_STEP = "is_first_step"
"""Evidence that says something only when it is true."""


def not_finite(evidence: dict[str, Any]) -> str:
    """`parameters are not finite (update_rms nan)`; empty for evidence of another detector."""
    quantities = evidence.get("quantities")
    if not isinstance(quantities, list | tuple) or FIRST_STEP not in evidence:
        return ""
    values = evidence.get("values") or {}
    with_value = ", ".join(f"{name} {value}" for name, value in values.items())
    others = [str(name) for name in quantities if name not in values]
    # Parameters first: they do not recover by themselves.
    others.sort(key=lambda name: name != "parameters")
    if others:
        verb = "is" if others in (["amax"], ["scale"]) else "are"
        told = f"{' and '.join(others)} {verb} not finite" + (f" ({with_value})" if with_value else "")
    else:
        told = f"not finite: {with_value}"
    if evidence.get("bad_before_training"):
        told += ", before training began"
    return told + (", in the first step" if evidence[FIRST_STEP] else "")


def telling(evidence: dict[str, Any]) -> dict[str, Any]:
    """Evidence without what says nothing."""
    return {key: value for key, value in evidence.items() if key != FIRST_STEP or value}
