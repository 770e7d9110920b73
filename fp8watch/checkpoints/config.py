"""Where and how often checkpoints are saved: the `checkpoints=` argument of `attach`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Settings of the checkpoints that fp8watch saves and rolls back to.

    Raises `ValueError` for a number out of range.
    """

    path: str | Path
    """Directory of all checkpoints of a run and of their ledger; made when it is absent."""
    every: int | None = None
    """Optimizer steps between two checkpoints; None: only when an action asks for one."""
    keep: int = 5
    """Checkpoints that rotation leaves; the newest good one stays beyond that."""
    healthy_steps: int = 20
    """Steps without an act finding after which a candidate may be called good (the settling window after a resume)."""

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("keep", 1), ("healthy_steps", 0)):
            value = getattr(self, name)
            if value is None and name == "every":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"Checkpoints({name}={value!r}): a whole number of at least {least} is needed")
        object.__setattr__(self, "path", Path(self.path))
