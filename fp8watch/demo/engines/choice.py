"""Which engine a demo runs on: Transformer Engine on a GPU that has it; where not, the reason in words."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fp8watch.demo.config import Device, EngineName


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An engine, and what to tell a person about it; empty on a CPU, where there is only one."""

    engine: EngineName
    told: str = ""


def choose(device: Device, load: Callable[[str], Any] = importlib.import_module) -> Choice:
    """The best engine for `device`. Never raises, whatever the import of a broken library does."""
    if device == "cpu":
        return Choice(engine="emulation")
    try:
        te = load("transformer_engine.pytorch")
        problem = _problem(te, load)
    except Exception as error:  # a build for another torch, CUDA or compiler can fail in any way
        problem = f"Transformer Engine cannot be imported ({type(error).__name__}: {error})"
    if problem:
        return Choice(engine="emulation", told=f"FP8 is emulated on the GPU: {problem}")
    version = getattr(load("transformer_engine"), "__version__", "of an unknown version")
    return Choice(engine="transformer_engine", told=f"FP8 by Transformer Engine {version}")


def _problem(te: Any, load: Callable[[str], Any]) -> str:
    """Why this library cannot be used; empty when it can."""
    if not hasattr(te, "autocast") or not hasattr(te, "is_fp8_available"):
        return "this Transformer Engine has no te.autocast: it is older than the demo knows"
    load("transformer_engine.common.recipe")
    if not hasattr(load("transformer_engine.pytorch.quantization"), "FP8GlobalStateManager"):
        return "this Transformer Engine keeps its FP8 state where the demo does not know it"
    is_available, reason = te.is_fp8_available(return_reason=True)
    return "" if is_available else f"{reason or 'the GPU has no FP8'}"
