"""Where and how often checkpoints are saved: the `checkpoints=` argument of `attach`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Settings of the checkpoints that fp8watch saves and rolls back to.

    Raises `ValueError` for a number out of range or settings that exclude each other.
    """

    path: str | Path
    """Directory of a run's checkpoints and their ledger. Created if missing. Only one run may use it at a time."""
    every: int | None = None
    """Optimizer steps between two checkpoints; None: only when an action asks for one."""
    keep: int = 5
    """Number of checkpoints that rotation keeps. It removes neither the newest nor the newest good one, so keep=1 may
    keep two."""
    healthy_steps: int = 20
    """Steps without an act finding after which a candidate becomes good (the settling window after a resume)."""
    format: Literal["torch", "dcp"] = "torch"
    """torch: `torch.save`, one file per rank (one for all if ranks hold replicas). dcp: `torch.distributed.checkpoint`,
    which another number of ranks can read, unless ranks held different tensors under one name (sharded by hand)."""
    background: bool = False
    """dcp only: write in the background from a copy of model and optimizer in host memory (its size is logged at the
    first save). Pending until durable. The next save waits for one that is not done."""
    save: Callable[[Path], Any] | None = None
    """Writes model and optimizer into the given folder in place of fp8watch. Called on every rank. May return an object
    with `done()` and `result()`, like `concurrent.futures.Future`; the checkpoint is then pending until it is done."""
    load: Callable[[Path], Any] | None = None
    """Reads what `save` wrote, in place. Called on every rank."""

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("keep", 1), ("healthy_steps", 0)):
            value = getattr(self, name)
            if value is None and name == "every":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"Checkpoints({name}={value!r}): a whole number of at least {least} is needed")
        if not isinstance(self.path, str | Path) or not str(self.path).strip():
            raise ValueError(f"Checkpoints({self.path!r}): the folder that checkpoints go into is needed")
        if self.format not in ("torch", "dcp"):
            raise ValueError(f"Checkpoints(format={self.format!r}): torch or dcp")
        if self.background and self.format != "dcp":
            raise ValueError('Checkpoints(background=True): needs format="dcp"')
        if (self.save is None) != (self.load is None):
            raise ValueError("Checkpoints(save=, load=): give both or none")
        if self.save is not None and self.format != "torch":
            raise ValueError(f"Checkpoints(save=, format={self.format!r}): give one of them")
        object.__setattr__(self, "path", Path(self.path))
