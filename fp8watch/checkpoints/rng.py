"""The random state of this process: `fp8watch.rng` for the host, and the GPUs' generators."""

from __future__ import annotations

from typing import Any

import torch

from fp8watch import rng as host


def capture() -> dict[str, Any]:
    """The state of all generators, as tensors and plain values."""
    state: dict[str, Any] = {"host": host.snapshot()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore(state: dict[str, Any]) -> None:
    """Restore all generators."""
    host.restore(state["host"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])


def check(state: dict[str, Any]) -> str | None:
    """Why this state cannot be restored here; None: it can."""
    saved = len(state.get("cuda", ()))
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return f"random state of {saved} GPUs, {present} are here" if saved > present else None
