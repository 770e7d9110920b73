"""Source for Transformer Engine with any recipes: delayed scaling from its update, stateless recipes from their GEMMs.

On sampled steps the casts themselves are measured too (`statistics`).

The tap on GEMM calls is put in when a module is found to use a stateless recipe, which is known after its first
forward. So a run that uses delayed scaling only never pays for it, and another is observed from its second step on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from operator import is_not
from typing import Any

import torch

from fp8watch.capture.cost_meter import CostMeter
from fp8watch.capture.governor import Kind
from fp8watch.capture.source import OneStep, Reading
from fp8watch.capture.te.delayed import TeDelayedSource
from fp8watch.capture.te.gemm_tap import GemmTap
from fp8watch.capture.te.stateless import TeStatelessSource
from fp8watch.capture.te.states import is_mixed, is_stateful, other_tensors
from fp8watch.capture.te.statistics import TeStatistics
from fp8watch.records import TensorColumn

logger = logging.getLogger(__name__)

EVERY_STEP_UNTIL, THEN_EVERY, SHARES, AT_ONCE = 4, 16, 4, 64
"""All modules are searched for stateless recipes in each of the first steps. Afterwards a quarter of them, or 64, is
searched in one step of 16: recipes seldom change during a run, and a search of a large model costs more than all else
in a step."""
WITHIN = THEN_EVERY * SHARES
"""Steps in which all have been searched."""


class TeSource:
    """Columns of delayed scaling come first. `extension` and `tap` replace TE's own in tests."""

    name = "transformer_engine"

    def __init__(self, model: torch.nn.Module, *, extension: Any | None = None, tap: GemmTap | None = None) -> None:
        self._model = model
        self._delayed = TeDelayedSource(model, extension=extension)
        self._stateless: TeStatelessSource | None = None
        self._tap = tap
        self._why_not: str | None = None
        self._statistics: TeStatistics | None = None
        try:
            self._statistics = TeStatistics(model, extension=extension)
        except (ImportError, AttributeError) as error:
            logger.warning("fp8watch: casts of this Transformer Engine cannot be counted: %s", error)
        self._num_begins = 0
        self._step = OneStep()
        self._was_sampled = True
        """Whether wrappers around casts may be in place."""
        self._to_ask: list[torch.nn.Module] = []
        self._share = 1
        """Modules searched at a time."""
        self._parts: tuple[Sequence[TensorColumn], Sequence[TensorColumn]] = ((), ())
        self._columns: Sequence[TensorColumn] = ()
        self._named_for: tuple[object, ...] = ()
        self._named: Sequence[str] = ()

    @property
    def meters(self) -> Mapping[Kind, CostMeter] | None:
        """Meters for the cost of counting."""
        return self._statistics.meters if self._statistics is not None else None

    @meters.setter
    def meters(self, meters: Mapping[Kind, CostMeter] | None) -> None:
        if self._statistics is not None:
            self._statistics.meters = meters

    def columns(self) -> Sequence[TensorColumn]:
        """The same object as long as neither part changes."""
        if self._stateless is None:
            return self._delayed.columns()
        delayed = self._delayed.columns()
        stateless = self._stateless.columns() if self._stateless is not None else ()
        if delayed is not self._parts[0] or stateless is not self._parts[1]:
            self._parts = (delayed, stateless)
            self._columns = [*delayed, *stateless] if stateless else delayed
        return self._columns

    def not_observable(self) -> Sequence[str]:
        """Modules and single tensors that neither part observes; the same object as long as nothing changes."""
        missing = self._delayed.not_observable()
        stateless = () if self._stateless is None else self._stateless.not_observable()
        columns = self.columns()
        seen_for = (missing, stateless, columns, self._why_not)
        if len(self._named_for) != len(seen_for) or any(map(is_not, seen_for, self._named_for)):
            self._named_for = seen_for
            self._named = [*self._missing(missing), *stateless, *self._partly(columns)]
        return self._named

    def _missing(self, missing: Sequence[str]) -> Sequence[str]:
        if self._stateless is None:
            return [f"{entry} ({self._why_not})" for entry in missing] if self._why_not else missing
        seen = self._stateless.modules
        return [entry for entry in missing if entry.partition(": ")[0] not in seen]

    def _partly(self, columns: Sequence[TensorColumn]) -> Iterator[str]:
        """Modules that mix recipes and have tensors that are not observed."""
        mixed = [(name, module) for name, module in self._model.named_modules() if is_mixed(module)]
        shown = {(column.module, column.tensor) for column in columns} if mixed else set()
        for name, module in mixed:
            unread = [(part, tensor, kind) for part, tensor, kind in other_tensors(module, name)
                      if (part, tensor) not in shown]  # fmt: skip
            if unread:
                tensors = ", ".join(f"{part}:{tensor}".removeprefix(f"{name}.") for part, tensor, _ in unread)
                kinds = " and ".join(sorted({kind for _, _, kind in unread}))
                yield f"{name}: {tensors} ({kinds}) are not read, only tensors with delayed scaling"

    def begin(self, *, with_statistics: bool) -> None:
        """Start an optimizer step."""
        self._delayed.begin(with_statistics=with_statistics)
        self._num_begins += 1
        if self._stateless is not None:
            self._stateless.begin(with_statistics=with_statistics)
        self._step.begin()  # also if counting, or looking for stateless recipes, fails
        if self._statistics is not None and (with_statistics or self._was_sampled):
            self._was_sampled = True  # if it raises, what is in place is taken out by the next step
            self._statistics.begin(is_sampled=with_statistics)
            self._was_sampled = self._statistics.is_listening  # until no wrapper is left
        if (
            self._stateless is None
            and (self._num_begins % THEN_EVERY == 0 or self._num_begins <= EVERY_STEP_UNTIL)
            and self._why_not is None and self._is_stateless_found()
        ):  # fmt: skip
            self._listen()

    def look_closer(self, modules: Sequence[str] | None) -> bool:
        """See `fp8watch.capture.closer.LooksCloser`."""
        return self._statistics is not None and self._statistics.look_closer(modules)

    def read(self) -> Reading | None:
        """The numbers of both parts; a part that did not run counts as not observed."""
        if not self._step.is_begun:
            return None
        reading = self._delayed.read() if self._stateless is None else self._read(self._stateless)
        if reading is not None:
            self._step.end()
        if self._statistics is not None and self._was_sampled:
            reading = self._statistics.add_to(reading, self.columns)
        return reading

    def _read(self, source: TeStatelessSource) -> Reading | None:
        delayed, stateless = self._delayed.read(), source.read()
        if not source.columns():
            return delayed
        if delayed is None and stateless is None:
            return None
        lengths = (len(self._delayed.columns()), len(source.columns()))
        if not lengths[0]:
            return stateless
        return _joined((delayed, stateless), lengths)

    def detach(self) -> None:
        """Stop listening to all taps."""
        if self._statistics is not None:
            self._statistics.detach()
        self._delayed.detach()
        if self._stateless is not None:
            self._stateless.detach()

    def _is_stateless_found(self) -> bool:
        if self._num_begins <= EVERY_STEP_UNTIL:
            return any(_is_stateless(module) for module in self._model.modules())
        if not self._to_ask:
            self._to_ask = [module for module in self._model.modules() if is_stateful(module)]
            self._share = max(AT_ONCE, -(-len(self._to_ask) // SHARES))
        turn, self._to_ask = self._to_ask[: self._share], self._to_ask[self._share :]
        return any(map(_is_stateless, turn))

    def _listen(self) -> None:
        try:
            self._stateless = TeStatelessSource(self._model, tap=self._tap)
        except (ImportError, AttributeError) as error:
            self._why_not = f"{type(error).__name__}: {error}"
            logger.warning("fp8watch: scales of this Transformer Engine's GEMMs cannot be read: %s", error)


def _is_stateless(module: Any) -> bool:
    meta = getattr(module, "fp8_meta", None)
    if not isinstance(meta, dict) or not getattr(module, "fp8", False):
        return False
    state = meta.get("scaling_fwd")
    return state is not None and (getattr(state, "scale", None) is None or is_mixed(module))


def _joined(parts: tuple[Reading | None, Reading | None], lengths: tuple[int, int]) -> Reading:
    found = [part for part in parts if part is not None]
    device = next(iter(found[0].values.values())).device
    names = [
        name for name in ("amax", "amax_last", "amax_local", "scale") if any(name in part.values for part in found)
    ]
    values: dict[str, torch.Tensor] = {}
    valid: dict[str, torch.Tensor] = {}
    for name in names:
        pieces, flags = [], []
        for part, length in zip(parts, lengths, strict=True):
            if part is None:
                pieces.append(torch.zeros(length, dtype=torch.float32, device=device))
                flags.append(torch.zeros(length, dtype=torch.bool, device=device))
            else:
                held = name if name in part.values else "amax"  # equal with one update, or one rank
                pieces.append(part.values[held])
                flags.append(part.validity(held))
        values[name], valid[name] = torch.cat(pieces), torch.cat(flags)
    return Reading(
        values=values,
        valid=valid,
        updates_forward=max(part.updates_forward for part in found),
        updates_backward=max(part.updates_backward for part in found),
    )
