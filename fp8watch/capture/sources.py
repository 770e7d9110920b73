"""Chooses the source for a model from its modules; imports only what the model itself has loaded.

Modules of a framework whose FP8 state this version cannot read are named one by one: silence is the worst failure.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from fp8watch.capture.controls import Fp8Controls
from fp8watch.capture.source import Source
from fp8watch.capture.torchao.scales import is_float8_linear

logger = logging.getLogger(__name__)

UNREAD = {"torchao.prototype": "torchao's prototype layers (MXFP8, NVFP4, blockwise) are not read by this version"}
"""Package of a module's class -> why it is not observed."""


@dataclass(slots=True, kw_only=True)
class Found:
    """The sources and controls for a model's FP8 layers."""

    sources: list[Source] = field(default_factory=list)
    """At most one in this version."""
    controls: Fp8Controls | None = None
    unseen: list[str] = field(default_factory=list)
    """`module: reason` of FP8 modules that no source reads."""
    framework: str = ""


def find(model: torch.nn.Module) -> Found:
    """Choose source and controls for a model."""
    found = Found()
    odd: dict[str, str] = {}
    for name, is_of, make in _FRAMEWORKS:
        modules = [path for path, module in model.named_modules() if _asked(is_of, path, module, odd)]
        if not modules:
            continue
        reason = f"{name}: only one framework's layers are read in a model, and {found.framework} came first"
        if not found.sources:
            try:
                source, controls = make(model)
                found.sources, found.controls, found.framework = [source], controls, name
                continue
            except Exception as error:  # a version of the framework that is not known here
                logger.debug("source for %s", name, exc_info=error)
                reason = f"{name}: {type(error).__name__}: {error}"
        found.unseen.extend(f"{path}: {reason}" for path in modules)
    found.unseen.extend(f"{path}: {reason}" for path, reason in _unread(model))
    found.unseen.extend(f"{path}: {reason}" for path, reason in odd.items())
    return found


def _asked(is_of: Callable[[torch.nn.Module], bool], path: str, module: torch.nn.Module, odd: dict[str, str]) -> bool:
    """Whether the module belongs to a framework. One that raises when inspected is recorded in `odd`."""
    try:
        return is_of(module)
    except Exception as error:
        odd[path] = f"{type(error).__name__}: {error}"
        return False


def _is_emulated(module: torch.nn.Module) -> bool:
    emulation = sys.modules.get("fp8watch.emulation.linear")
    return emulation is not None and isinstance(module, emulation.Fp8Linear)


def _make_emulated(model: torch.nn.Module) -> tuple[Source, Fp8Controls]:
    from fp8watch.capture.emulated import EmulatedSource
    from fp8watch.capture.emulated_controls import EmulatedControls

    return EmulatedSource(model), EmulatedControls(model)


def _is_transformer_engine(module: torch.nn.Module) -> bool:
    # Other frameworks derive their layers from TE's, in Python modules of their own (Megatron's `TELinear`).
    if not any(base.__module__.startswith("transformer_engine") for base in type(module).__mro__):
        return False
    return isinstance(getattr(module, "fp8_meta", None), dict) or _quantizes(module)


def _make_transformer_engine(model: torch.nn.Module) -> tuple[Source, Fp8Controls]:
    from fp8watch.capture.te.controls import TeControls
    from fp8watch.capture.te.source import TeSource

    controls = TeControls(model)
    return TeSource(model), controls


def _make_torchao(model: torch.nn.Module) -> tuple[Source, Fp8Controls]:
    from fp8watch.capture.torchao.controls import TorchaoControls
    from fp8watch.capture.torchao.float8 import TorchaoSource

    return TorchaoSource(model), TorchaoControls(model)


_FRAMEWORKS: tuple[tuple[str, Callable[[torch.nn.Module], bool], Callable[[torch.nn.Module], Any]], ...] = (
    ("emulation", _is_emulated, _make_emulated),
    ("Transformer Engine", _is_transformer_engine, _make_transformer_engine),
    ("torchao", is_float8_linear, _make_torchao),
)


def _unread(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    for path, module in model.named_modules():
        homes = [base.__module__ for base in type(module).__mro__]
        for package, reason in UNREAD.items():
            if any(home == package or home.startswith(package + ".") for home in homes):
                yield path, reason


def _quantizes(operation: Any) -> bool:
    """Whether an operation of `te.ops` has tensors to quantize (TE 2.20 `pytorch/ops/op.py`)."""
    try:
        return any(operation.num_quantizers(mode) for mode in ("forward", "backward"))
    except (AttributeError, TypeError, ValueError):  # not an operation, or one of another version
        return False
