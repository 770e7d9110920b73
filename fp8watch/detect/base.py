"""What a detector is: a pure function of (state, sample) that reports symptoms.

A detector never looks ahead, never touches I/O or a clock, and keeps all it knows in its state, a frozen or
plain-data object that `msgspec` can encode, so that a standby controller continues where another stopped.
Cause is not a detector's business: `fp8watch.detect.attribution` weighs the evidence of a whole window.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fp8watch.records import Severity, TensorColumn

Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One optimizer step of a whole run, ranks merged: what detectors see.

    `tensors[i]` describes element i of every array in `values`; `valid[name][i]` says whether it was observed.
    A name that is absent from `values` was not observed in this step. The keys are those of
    `fp8watch.records.StepFrame`.
    """

    attempt: int
    step: int
    scalars: dict[str, float]
    tensors: tuple[TensorColumn, ...] = ()
    values: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    valid: dict[str, Mask] = field(default_factory=dict)
    updates_forward: int = 1
    updates_backward: int = 1
    is_quiet: bool = False
    """In warm-up or just after a resume or rollback: baseline rules keep still (non-finite and scale rules do not)."""
    rank_of_extreme: dict[str, int] = field(default_factory=dict)
    """Scalar or column name -> rank that held the extreme value, in runs of several ranks."""
    num_ranks: int = 1
    expected_ranks: int = 0
    """Ranks that ought to have given a frame of this step; 0: not known (a log of another tool)."""
    rank_median: dict[str, float] = field(default_factory=dict)
    """Scalar name -> median over ranks, in runs of several; NaN counts as the largest."""
    rank_values: dict[str, dict[int, float]] = field(default_factory=dict)
    """`param_checksum`, `scale_checksum`, `precision_checksum` -> rank -> value: what must be equal in ranks that hold
    the same."""
    tensor_groups: tuple[tuple[int, ...], ...] = ()
    """Ranks that were declared to hold parts of the same tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """What one detector sees in one step; symptoms of an event are gathered into one incident."""

    detector: str
    severity: Severity
    step: int
    onset_step: int
    tensors: tuple[int, ...] = ()
    """Indices into `Sample.tensors`, worst first."""
    modules: tuple[str, ...] = ()
    """Modules concerned of which there is no tensor in the sample, worst first."""
    rank: int | None = None
    evidence: dict[str, Any] = field(default_factory=dict)


class Detector(Protocol):
    """A named rule. `update` returns the next state and what is seen now; `state` starts as `start()`.

    One that has a true attribute `of_tensors` looks at per-tensor values only: it is not asked about a sample without.
    """

    name: str

    def start(self) -> Any:
        """The state before the first sample."""

    def update(self, state: Any, sample: Sample) -> tuple[Any, list[Symptom]]:
        """Take one step in. Pure: the same state and sample give the same result."""
