"""Converting the demo's model to FP8: emulation on any machine, Transformer Engine on a GPU that has it."""

from __future__ import annotations

from fp8watch.demo.config import EngineName
from fp8watch.demo.engines.base import Engine, Region, Scales
from fp8watch.demo.engines.emulated import Emulation


def engine(name: EngineName) -> Engine:
    """The engine of that name. Raises `ImportError` where its library is missing."""
    if name == "emulation":
        return Emulation()
    from fp8watch.demo.engines.transformer_engine import TransformerEngine

    return TransformerEngine()


__all__ = ["Engine", "Region", "Scales", "engine"]
