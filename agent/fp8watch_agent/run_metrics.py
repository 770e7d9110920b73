"""The metrics of one run except its tensors: scalars per rank, counters and state.

Loss and update RMS are averaged over ranks; of other scalars the largest counts. A non-finite value is counted by
quantity, and its gauge keeps the last finite value, so that alert rules never see NaN.
"""

from __future__ import annotations

import copy
import math
from collections import Counter, deque
from dataclasses import dataclass, field, replace

from fp8watch.controller.open_findings import Open
from fp8watch.records import ActionRecord, Finding, Goodbye, Hello, Layout, StepFrame
from fp8watch_agent.tensor_metrics import TensorMetrics

GAUGES = {
    "loss": "fp8watch_loss", "grad_norm": "fp8watch_grad_norm", "learning_rate": "fp8watch_learning_rate",
    "clip_limit": "fp8watch_clip_limit", "loss_scale": "fp8watch_loss_scale", "update_rms": "fp8watch_update_rms",
    "bf16_modules": "fp8watch_bf16_modules", "sampling_ratio": "fp8watch_sampling_overhead_ratio",
    "fp8_parameter_share": "fp8watch_fp8_parameter_ratio",
}  # fmt: skip
"""Scalar of a frame -> gauge."""
MEANS = frozenset({"loss", "update_rms"})
NONFINITE_QUANTITIES = ("loss", "grad_norm", "update_rms", "parameter", "amax", "scale", "tensor")
DROP_REASONS = ("queue_full", "disconnected", "ring_full", "too_large", "malformed", "foreign")
UNSEEN_REASONS = ("missing", "late")
STATES = ("running", "ended", "lost", "halted")
ENDINGS = ("helped", "no_effect", "reverted")
NOT_APPLIED = ("failed", "vetoed", "expired", "unavailable", "refused")
_REMEMBERED_IDS = 20_000


@dataclass(slots=True)
class _RankScalars:
    attempt: int
    step: int = 0
    time_unix: float = 0.0
    values: dict[str, float] = field(default_factory=dict)


class RunMetrics:
    """Not thread-safe: `MetricsState` holds the lock."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.is_heard = False
        """Whether a rank has sent a message; False for a run known from the controller only."""
        self.mode = "observe"
        self.state = "running"
        self.state_since = 0.0
        self.hello: Hello | None = None
        self.hellos: dict[int, Hello] = {}
        self.open: Open | None = None
        """Findings open now; None: the run's controller is not in this process."""
        self._attempt = 0
        self._failed_attempt = self._halted_attempt = -1
        self.recipe = ""
        self.tensors = TensorMetrics()
        self.evaluations: dict[str, float] = {}
        self.steps = 0
        self.tokens = 0.0
        self.clipped_steps = 0
        self.skipped_steps = 0
        self.loss_spikes = 0
        self.store_errors = 0
        self.nonfinite: Counter[str] = Counter()
        self.findings: Counter[tuple[str, str, str]] = Counter()
        self.actions: Counter[tuple[str, str]] = Counter()
        self.dropped: Counter[str] = Counter(dict.fromkeys(DROP_REASONS, 0))
        self.unseen: Counter[str] = Counter(dict.fromkeys(UNSEEN_REASONS, 0))
        self._reported_drops: dict[int, dict[str, int]] = {}
        self._ranks: dict[int, _RankScalars] = {}
        self._newest = (-1, -1)
        self._seen: deque[str] = deque()
        self._seen_set: set[str] = set()

    @property
    def is_live(self) -> bool:
        """Whether ranks of this run are training now."""
        return self.is_heard and self.state == "running"

    def head(self) -> RunMetrics:
        """A copy without the tensors. Later messages do not change it."""
        made = copy.copy(self)
        made.tensors = _NO_TENSORS
        made.hellos, made.evaluations = self.hellos.copy(), self.evaluations.copy()
        made.nonfinite, made.findings, made.actions = self.nonfinite.copy(), self.findings.copy(), self.actions.copy()
        made.dropped, made.unseen = self.dropped.copy(), self.unseen.copy()
        made._ranks = {number: replace(rank, values=rank.values.copy()) for number, rank in self._ranks.items()}
        return made

    def greet(self, hello: Hello, now: float) -> None:
        """A rank has connected or has started a new attempt."""
        before = self.hellos.get(hello.rank)
        if before is None or before.pid != hello.pid:
            self._reported_drops.pop(hello.rank, None)  # a new process counts from 0
        self.hello = hello if self.hello is None or hello.rank <= self.hello.rank else self.hello
        self.hellos[hello.rank] = hello
        self._attempt = max(self._attempt, hello.attempt)
        self._ranks.setdefault(hello.rank, _RankScalars(attempt=hello.attempt, step=hello.step))
        self.set_state("running", now)

    def layout(self, layout: Layout, *, is_kept: bool = True) -> None:
        """Set a rank's columns. Without `is_kept` its tensors are not exported. Raises `WireError` for too many."""
        if is_kept:
            self.tensors.layout(layout)
        else:
            self.tensors.forget_rank(layout.rank)
        if layout.columns:
            self.recipe = layout.columns[0].recipe
        self._rank(layout.rank, layout.attempt).values.update(
            observed_modules=float(layout.observed_modules), expected_modules=float(layout.expected_modules)
        )

    def frame(self, frame: StepFrame, now: float) -> None:
        """Apply one rank's step. Raises `WireError` when its columns do not fit; the scalars count all the same."""
        rank = self._rank(frame.rank, frame.attempt)
        rank.attempt, rank.step, rank.time_unix = frame.attempt, frame.step, frame.time_unix
        scalars = frame.scalars
        for name, value in scalars.items():
            if math.isfinite(value):
                rank.values[name] = value
            elif name in NONFINITE_QUANTITIES:
                self.nonfinite[name] += 1
        if scalars.get("param_nonfinite", 0.0) > 0:
            self.nonfinite["parameter"] += 1
        tokens = scalars.get("tokens", 0.0)
        self.tokens += tokens if math.isfinite(tokens) and tokens > 0 else 0.0
        if (frame.attempt, frame.step) > self._newest:
            self._newest = (frame.attempt, frame.step)
            self.steps += 1
            self.clipped_steps += _is_clipped(scalars)
            self.skipped_steps += scalars.get("update_skipped", 0.0) > 0
        self.add_reported_drops(frame.rank, frame.dropped)
        for quantity, count in self.tensors.observe(frame, now).items():
            self.nonfinite[quantity] += count

    def add_reported_drops(self, rank: int, dropped: dict[str, int]) -> None:
        """Count what a rank has dropped since its last report. `dropped` holds its totals."""
        before = self._reported_drops.get(rank, {})
        for reason, count in dropped.items():
            self.dropped[reason] += max(0, count - before.get(reason, 0))
        if dropped:
            self._reported_drops[rank] = dropped

    def goodbye(self, goodbye: Goodbye) -> None:
        """A rank has said goodbye."""
        self.add_reported_drops(goodbye.rank, goodbye.dropped)
        if _is_failure(goodbye.reason):
            self._failed_attempt = self._attempt
        if goodbye.reason == "halted":
            self._halted_attempt = self._attempt

    @property
    def has_failed(self) -> bool:
        """Whether a rank has left with an error in the newest attempt."""
        return self._failed_attempt == self._attempt

    @property
    def is_halted(self) -> bool:
        """Whether a rank has reported in the newest attempt that the policy halted it."""
        return self._halted_attempt == self._attempt

    @property
    def expected_ranks(self) -> int:
        """World size that the ranks report; 0: no hello yet."""
        return max((hello.world_size for hello in self.hellos.values()), default=0)

    def forget_rank(self, rank: int) -> None:
        """Remove a rank that is gone while others continue."""
        self._ranks.pop(rank, None)
        self.hellos.pop(rank, None)
        self.tensors.forget_rank(rank)

    def finding(self, finding: Finding) -> None:
        """Count a finding once per ID, and a loss spike once per incident."""
        if self._is_new(f"finding {finding.id}"):
            self.findings[finding.detector, finding.cause, finding.severity] += 1
        if finding.detector == "loss_spike" and self._is_new(f"spike {finding.incident or finding.id}"):
            self.loss_spikes += 1

    def action(self, record: ActionRecord) -> None:
        """Count an action when it is applied (`pending`) and again at its outcome, each once per ID."""
        if record.status in ("applied", "reverted") and self._is_new(f"action {record.id} pending"):
            self.actions[record.action, "pending"] += 1
        ending = record.outcome if record.outcome in ENDINGS else record.status
        if ending in ENDINGS + NOT_APPLIED and self._is_new(f"action {record.id} {ending}"):
            self.actions[record.action, ending] += 1

    def set_state(self, state: str, now: float) -> None:
        """Set the run's state. `now`: seconds of the monotonic clock."""
        if state != self.state or self.state_since == 0.0:
            self.state, self.state_since = state, now

    def gauge(self, name: str) -> float | None:
        """A scalar merged over ranks; None if no rank has observed it."""
        values = [rank.values[name] for rank in self._current() if name in rank.values]
        if not values:
            return None
        return sum(values) / len(values) if name in MEANS else max(values)

    def largest(self, name: str) -> tuple[float, int] | None:
        """The largest value of a scalar and its rank; None if no rank has observed it."""
        held = [
            (r.values[name], -number) for number, r in self._ranks.items() if r in self._current() and name in r.values
        ]
        value, rank = max(held, default=(0.0, 1))
        return (value, -rank) if held else None

    def position(self) -> tuple[int, int, float] | None:
        """Attempt, step and Unix time of the newest frame of the newest attempt."""
        current = [rank for rank in self._current() if rank.time_unix > 0]
        if not current:
            return None
        return current[0].attempt, max(r.step for r in current), max(r.time_unix for r in current)

    def overhead_ratio(self) -> float | None:
        """Largest share of a step that a training thread spent in fp8watch."""
        ratios = [
            rank.values["overhead_seconds"] / rank.values["step_seconds"]
            for rank in self._current()
            if "overhead_seconds" in rank.values and rank.values.get("step_seconds", 0.0) > 0
        ]
        return max(ratios, default=None)

    def _rank(self, rank: int, attempt: int) -> _RankScalars:
        return self._ranks.setdefault(rank, _RankScalars(attempt=attempt))

    def _current(self) -> list[_RankScalars]:
        newest = max((rank.attempt for rank in self._ranks.values()), default=0)
        return [rank for rank in self._ranks.values() if rank.attempt == newest]

    def _is_new(self, key: str) -> bool:
        if key in self._seen_set:
            return False
        self._seen_set.add(key)
        self._seen.append(key)
        if len(self._seen) > _REMEMBERED_IDS:
            self._seen_set.discard(self._seen.popleft())
        return True


_NO_TENSORS = TensorMetrics()


def _is_failure(reason: str) -> bool:
    """Whether a goodbye's reason is a training error. A keyboard interrupt and `sys.exit` are not."""
    is_error = reason.startswith("error: ") or reason == "ranks apart"
    return is_error and reason not in ("error: KeyboardInterrupt", "error: SystemExit")


def _is_clipped(scalars: dict[str, float]) -> bool:
    norm, limit = scalars.get("grad_norm"), scalars.get("clip_limit")
    return norm is not None and limit is not None and norm > limit
