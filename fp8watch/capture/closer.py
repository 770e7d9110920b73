"""Sampled measurements, too costly for every step: when they are due, what they found, what they cost.

Element counts and what-if figures come from the source, the shadow probe has hooks of its own, the moments come from
the optimizer. All of it only reads; the results are device tensors that go through the ring with the step's other
numbers. The recorder calls `begin` before a step and `finish` at its boundary.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import msgspec
import torch

from fp8watch.capture.cost_meter import CostMeter
from fp8watch.capture.fp8_share import fp8_share
from fp8watch.capture.governor import FIRST_SHARE, Governor, Kind
from fp8watch.capture.optimizer_states import OptimizerStates
from fp8watch.capture.shadow_probe import ShadowProbe
from fp8watch.capture.source import Reading, Source
from fp8watch.records import TensorColumn

logger = logging.getLogger(__name__)

SHADOW_ERROR = "shadow_error"
"""Per-tensor column: relative error of the module's forward GEMM, in the row of its input."""
PROBED_TENSOR = "input"
MOST_LEFT_OUT = 8
"""Most linear layers outside FP8 that are named one by one."""
SHARE_EVERY = 16
"""What-if steps between two searches of the model for layers converted to FP8 or back (a millisecond each)."""
REQUESTS = 64
"""Most requested probes that wait for their turn (one per step); the oldest are dropped."""


@runtime_checkable
class LooksCloser(Protocol):
    """A source that has access to the values of its casts."""

    def look_closer(self, modules: Sequence[str] | None) -> bool:
        """Make what-if columns for these modules (None: all) in the step that has just begun. False: not possible."""


@runtime_checkable
class Metered(Protocol):
    """A source that times its sampling work by kind."""

    meters: Mapping[Kind, CostMeter] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CloserOptions:
    """Intervals in steps (None: the default of the device, 0: never) and the budget; see `fp8watch.settings`."""

    statistics_every: int | None = None
    what_if_every: int | None = None
    shadow_every: int | None = None
    overhead_budget: float | None = None


def intervals(options: CloserOptions, device: torch.device) -> dict[Kind, int]:
    """Steps by kind (0: never). What-if is a multiple of the element counts, because the two are compared."""
    is_cpu = device.type == "cpu"
    statistics = options.statistics_every or (1 if is_cpu else 10)
    what_if = options.what_if_every if options.what_if_every is not None else (64 if is_cpu else 100)
    shadow = options.shadow_every if options.shadow_every is not None else (64 if is_cpu else 100)
    return {"statistics": statistics, "what_if": -(-what_if // statistics) * statistics, "shadow": shadow}


class CloserLook:
    """The sampled measurements of one recorder. Runs inside the recorder's guard."""

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        source: Source | None,
        modules: Iterable[str],
        device: torch.device,
        options: CloserOptions,
        not_observed: Callable[[str, str], None],
    ) -> None:
        self._source = source
        self._device = device
        self._not_observed = not_observed
        budget = options.overhead_budget
        if budget is None and device.type != "cpu":
            budget = FIRST_SHARE  # on a CPU FP8 is emulated, and its cost says nothing about a real run
        self.governor = Governor(intervals(options, device), budget=budget, say=_say)
        self._meters: dict[Kind, CostMeter] = {kind: CostMeter(device) for kind in ("statistics", "what_if", "shadow")}
        if isinstance(source, Metered):
            source.meters = self._meters
        wanted = set(modules)
        self.probe = ShadowProbe(
            {name: module for name, module in model.named_modules() if name in wanted}, self._meters["shadow"]
        )
        if self.probe.not_probeable:
            name, why = next(iter(self.probe.not_probeable.items()))
            not_observed(SHADOW_ERROR, f"{len(self.probe.not_probeable)} layers cannot be probed, as {name}: {why}")
        self._model, self._fp8_modules = model, frozenset(wanted)
        self._share = fp8_share(model, self._fp8_modules)
        if self._share.left_out and wanted:
            shown = "; ".join(self._share.left_out[:MOST_LEFT_OUT])
            not_observed(f"{len(self._share.left_out)} linear layers are not in FP8", shown)
        self._probe_next = 0
        self._misses = 0
        """Consecutive probes that found nothing."""
        self._asked_probes: deque[str] = deque(maxlen=REQUESTS)
        self._asked_what_if: set[str] = set()
        self._states = OptimizerStates(optimizer)
        self._is_sampled = False
        self._said_what_if = False
        self._told = -1
        """The governor's number of changes when the intervals were last reported."""
        self._is_telling = True
        self._num_told = 0
        self._quiet = range(0)
        """Steps in which nothing is due; holds as long as the governor's number of changes is `_quiet_since`."""
        self._quiet_since = -1
        self.is_at_rest = False
        """Whether `finish` has nothing to do in this step."""

    # A step

    def begin(self, step: int) -> None:
        """Start a step: decide what is measured in it, and arm the source and the probe."""
        is_asked = self._asked_what_if or self._asked_probes
        if step in self._quiet and self._quiet_since == self.governor.num_changes and not is_asked:
            self._is_sampled = self._is_telling = False
            if self._source is not None:
                self._source.begin(with_statistics=False)
            return
        self.is_at_rest = False
        self._quiet, self._quiet_since = range(step + 1, self.governor.next_due(step + 1)), self.governor.num_changes
        is_what_if = self._is_telling = self.governor.due("what_if", step) and step > 1
        asked, self._asked_what_if = self._asked_what_if, set()
        self._is_sampled = self.governor.due("statistics", step) or is_what_if or bool(asked)
        if self._source is not None:
            self._source.begin(with_statistics=self._is_sampled)
            if is_what_if or asked:
                self._look(None if is_what_if else sorted(asked))
        self._arm(is_due=self.governor.due("shadow", step) and step > 1)

    def begin_plainly(self) -> None:
        """Start a step in which nothing is sampled: what remains when `begin` fails, or is not called any more. Else
        the source would go on with the step before, and could not be read. Raises what the source raises."""
        self._is_sampled = self._is_telling = False
        if self._source is not None:
            self._source.begin(with_statistics=False)

    def _look(self, modules: list[str] | None) -> None:
        if isinstance(self._source, LooksCloser) and self._source.look_closer(modules):
            return
        if not self._said_what_if:
            self._said_what_if = True
            self._not_observed("what_if", "this source cannot see the values of casts; predictions use amax alone")

    def _arm(self, *, is_due: bool) -> None:
        while self._asked_probes:
            if self.probe.arm(self._asked_probes.popleft()):
                return
        names = self.probe.names
        if is_due and self._misses < len(names):
            self._probe_next = (self._probe_next + 1) % len(names)
            self.probe.arm(names[self._probe_next - 1])

    def finish(
        self, reading: Reading | None, columns: Callable[[], Sequence[TensorColumn]]
    ) -> tuple[Reading | None, dict[str, float | torch.Tensor]]:
        """At the boundary: returns the reading with the probe's column added, and the scalars of the sample."""
        scalars: dict[str, float | torch.Tensor] = {}
        if self.probe.is_armed:
            reading = self._take_probe(reading, columns)
        if self._is_sampled:
            with self._meters["statistics"].piece(is_alone=True):
                scalars |= self._states.read()
            if self._states.not_observable is not None:
                self._not_observed("optimizer states", self._states.not_observable)
        self._account()
        if self._is_telling or self.governor.num_changes != self._told:
            self._told = self.governor.num_changes
            scalars["fp8_parameter_share"] = self._share_now()
            self._num_told += 1
            share = self.governor.share()
            scalars |= {f"{kind}_every": float(self.governor.every(kind)) for kind in self._meters}
            if share is not None:
                scalars["sampling_ratio"] = share
        # Until `begin` finds something due, unless a meter still waits for the device.
        self.is_at_rest = all(meter.is_idle for meter in self._meters.values())
        return reading, scalars

    def _take_probe(self, reading: Reading | None, columns: Callable[[], Sequence[TensorColumn]]) -> Reading | None:
        probed = self.probe.take()
        self._misses = 0 if probed is not None else self._misses + 1
        if probed is not None:
            return reading if reading is None else self._with_probe(reading, columns(), *probed)
        name, why = next(reversed(self.probe.missed.items()))
        self._not_observed(SHADOW_ERROR, f"{name}: {why}")
        return reading

    def _with_probe(self, reading: Reading, columns: Sequence[TensorColumn], name: str, error: torch.Tensor) -> Reading:
        row = next((i for i, c in enumerate(columns) if c.module == name and c.tensor == PROBED_TENSOR), None)
        first = next(iter(reading.values.values()))
        num, device = first.shape[0], first.device
        if row is None or row >= num:
            return reading
        values = torch.zeros(num, dtype=torch.float32, device=device)
        values[row].copy_(error, non_blocking=True)
        valid = torch.zeros(num, dtype=torch.bool, device=device)
        valid[row].fill_(True)
        # 0 / 0, or a NaN that was in the data already, says nothing about the cast.
        valid &= torch.isfinite(values)
        return msgspec.structs.replace(
            reading,
            values={**reading.values, SHADOW_ERROR: values},
            valid=reading.valid | {SHADOW_ERROR: valid},
        )

    def _account(self) -> None:
        for kind, meter in self._meters.items():
            meter.close_step()
            for seconds in meter.take():
                self.governor.cost(kind, seconds)

    def _share_now(self) -> float:
        if self._num_told % SHARE_EVERY:
            return self._share.parameters
        now = fp8_share(self._model, self._fp8_modules)
        if now.parameters != self._share.parameters:
            logger.warning(
                "fp8watch: FP8 layers hold %.1f %% of the linear layers' weights, before it was %.1f %%",
                100 * now.parameters, 100 * self._share.parameters,
            )  # fmt: skip
            self._share = now
        return now.parameters

    # On demand

    def ask(self, modules: Sequence[str], *, what_if: bool = True, shadow: bool = True) -> None:
        """Measure these modules in the coming steps: what-if figures in the next one, then one probe per step."""
        if what_if:
            self._asked_what_if.update(modules)
        if shadow:
            self._asked_probes.extend(name for name in modules if name in self.probe.names)

    def detach(self) -> None:
        """Remove all hooks."""
        self.probe.detach()


def _say(text: str) -> None:
    logger.warning("fp8watch: %s", text)
