"""fp8watch keeps FP8 training runs healthy while they run.

`import fp8watch` is lazy (PEP 562): neither torch nor anything of the agent is loaded before it is used. That holds for
sub-packages too: `fp8watch.emulation.convert` needs no import of its own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8watch.checkpoints import Checkpoints
    from fp8watch.errors import Halted, RanksApart
    from fp8watch.training.attachment import attach
    from fp8watch.training.watch import Watch

__version__ = "0.1.0"
__all__ = ["Checkpoints", "Halted", "RanksApart", "Watch", "__version__", "attach"]

_HOME = {
    "attach": "fp8watch.training.attachment",
    "Checkpoints": "fp8watch.checkpoints",
    "Halted": "fp8watch.errors",
    "RanksApart": "fp8watch.errors",
    "Watch": "fp8watch.training.watch",
}
_PACKAGES = frozenset({"checkpoints", "detect", "emulation", "errors", "policy", "records", "replay", "security"})
"""Sub-packages and modules that a script may use without importing them by name."""


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES})
