"""The report of `attach`: what is watched, what cannot be, and which actions are unavailable and why."""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from fp8watch.identity import Identity
from fp8watch.records import Layout

logger = logging.getLogger("fp8watch")

MAX_NAMES = 6
"""Most names in one line of the report; the rest is counted. `watch.not_observable` has all of them."""


def lines(
    *,
    identity: Identity,
    layout: Layout,
    framework: str,
    policy_name: str,
    mode: str,
    capabilities: Mapping[str, str],
    directory: Path,
    agent: str | None = None,
    disarmed: str | None = None,
) -> list[str]:
    """The report as lines of plain text. `directory`: the run's folder under FP8WATCH_DIR. `agent`: address of the
    node's agent, which then keeps the records. `disarmed`: why nothing may act, whatever the policy says."""
    rank = f", rank {identity.rank} of {identity.world_size}" if identity.world_size > 1 else ""
    kept = f"records in {directory}" if agent is None else f"records with the agent at {agent}"
    text = [f"fp8watch: run {identity.run}{rank}, policy {policy_name} ({mode}), {kept}"]
    if agent is not None:
        text.append(f"  the agent keeps them in its --dir, or in its cluster's Redis; in {directory}: journal and lock")
    if disarmed is not None and mode != "observe":
        text.append(f"  nothing acts: {disarmed}")
    if layout.columns:
        text.append(
            f"  watching {layout.observed_modules} of {layout.expected_modules} FP8 modules "
            f"({framework}, {layout.columns[0].recipe} scaling, {len(layout.columns)} tensors), loss and gradients"
        )
    elif layout.expected_modules or framework:
        text.append(f"  {framework or 'FP8'} modules found; tensors are known after the first step")
    else:
        text.append("  no FP8 layer in this model: watching loss and gradients only")
    if layout.not_observable:
        text.append("  not observed: " + _shorten(layout.not_observable, "; "))
    by_reason: dict[str, list[str]] = defaultdict(list)
    for action, reason in capabilities.items():
        if reason:
            by_reason[reason].append(action)
    if by_reason:
        text.append("  unavailable actions:")
        text.extend(f"    {', '.join(actions)}: {reason}" for reason, actions in by_reason.items())
    return text


def listed(names: Sequence[str], most: int) -> str:
    """The first `most` names, as in `a, b and 3 more`."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _shorten(names: list[str], separator: str) -> str:
    shown = separator.join(names[:MAX_NAMES])
    return shown if len(names) <= MAX_NAMES else f"{shown}{separator}and {len(names) - MAX_NAMES} more"


def say(text: list[str]) -> None:
    """Write the report to the log if that shows INFO, else to standard error. Never to standard output."""
    if logger.isEnabledFor(logging.INFO):
        for line in text:
            logger.info("%s", line)
        return
    # Without rich, which draws from Python's random generator on import.
    print("\n".join(text), file=sys.stderr)
