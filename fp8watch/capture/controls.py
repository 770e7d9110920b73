"""What can be changed in a framework's FP8 modules during training: the writing counterpart of `Source`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Fp8Controls(Protocol):
    """Precision and scales of named modules, in place, between optimizer steps."""

    name: str

    def modules(self) -> Sequence[str]:
        """Qualified names of the FP8 modules, whatever precision they run in at present."""

    def set_high_precision(self, modules: Sequence[str], *, high_precision: bool) -> None:
        """Run these modules in BF16, or again in FP8 with scales made from the amax measured meanwhile."""

    def ran_high_precision(self, modules: Sequence[str]) -> list[bool | None]:
        """Whether each module's last forward really was in high precision; None: it has not run since the switch."""

    def repair_scales(self, tensors: Sequence[str]) -> dict[str, float]:
        """Purge poisoned amax windows of `module:tensor` and set scales from clean amax; returns the new scales."""

    def scales(self, tensors: Sequence[str]) -> dict[str, float]:
        """Scales in force, by `module:tensor`."""

    def highest_scales(self, tensors: Sequence[str]) -> dict[str, float]:
        """The largest scale at which the newest measured amax fits, by `module:tensor`; unknown ones are left out.

        The result of `repair_scales` is checked against it, so it must depend on nothing but that amax.
        """

    def margin(self) -> float | None:
        """Margin of the live recipe in powers of two; None if the recipe has none."""

    def set_margin(self, margin: float) -> None:
        """Set the margin in the live recipe object."""

    def state_dict(self) -> dict[str, object]:
        """FP8 state that the model's own state_dict does not hold (tensors and plain values only)."""

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore it in place."""
