"""What a detector is: a pure function of (state, sample) that reports symptoms.

A detector never looks ahead, does no I/O and reads no clock. Everything it knows is in its state, a plain-data object
that `msgspec` can encode, so that a standby controller continues where another stopped.
A detector does not name causes: `fp8watch.detect.attribution` weighs the evidence of a whole window.
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
    """One optimizer step of a whole run, ranks merged: the input of every detector.

    `tensors[i]` describes element i of every array in `values`; `valid[name][i]` says whether it was observed. A name
    absent from `values` was not observed in this step. The keys are those of `fp8watch.records.StepFrame`.
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
    """In warm-up or just after a resume or rollback: baseline rules stay silent (non-finite and scale rules do not)."""
    rank_of_extreme: dict[str, int] = field(default_factory=dict)
    """Scalar or column name -> rank that held the extreme value; empty in a run of one rank."""
    num_ranks: int = 1
    expected_ranks: int = 0
    """Ranks that should have sent a frame for this step; 0: unknown (a log of another tool)."""
    rank_median: dict[str, float] = field(default_factory=dict)
    """Scalar name -> median over ranks (NaN counts as the largest); empty in a run of one rank."""
    rank_values: dict[str, dict[int, float]] = field(default_factory=dict)
    """`param_checksum`, `scale_checksum`, `precision_checksum` -> rank -> value. Replicas must have equal values."""
    tensor_groups: tuple[tuple[int, ...], ...] = ()
    """Groups of ranks declared to hold parts of the same tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """What one detector sees in one step; the symptoms of one event become one incident."""

    detector: str
    severity: Severity
    step: int
    onset_step: int
    tensors: tuple[int, ...] = ()
    """Indices into `Sample.tensors`, worst first."""
    modules: tuple[str, ...] = ()
    """Affected modules that have no tensor in the sample, worst first."""
    rank: int | None = None
    evidence: dict[str, Any] = field(default_factory=dict)


class Detector(Protocol):
    """A named rule. `update` returns the next state and the symptoms of this step; the first state is `start()`.

    Two optional attributes: `of_tensors = True` for a detector that reads per-tensor values only and is not called for
    samples without any; `rolled_back(state, step)` returns the state after a rollback to `step` (without it, or when it
    fails, the detector starts again).
    """

    name: str

    def start(self) -> Any:
        """The state before any sample."""

    def update(self, state: Any, sample: Sample) -> tuple[Any, list[Symptom]]:
        """Process one step. Pure: the same state and sample give the same result."""
