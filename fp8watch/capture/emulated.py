"""Source for `fp8watch.emulation`: a tap on its casts and scale updates, as for Transformer Engine.

Everything is kept in tensors with one element per column, changed by a few operations per scale update; nothing is
converted to a Python number.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from fp8watch.capture.blocks import block_of
from fp8watch.capture.cost_meter import CostMeter
from fp8watch.capture.governor import Kind
from fp8watch.capture.source import OneStep, Reading
from fp8watch.capture.what_if import WhatIfLog
from fp8watch.emulation.linear import Fp8Linear
from fp8watch.emulation.statistics import CastStatistics
from fp8watch.emulation.taps import add_tap, add_value_tap, remove_tap, remove_value_tap
from fp8watch.formats import Fp8Format
from fp8watch.records import TensorColumn

_log = logging.getLogger(__name__)

TENSORS: tuple[Literal["input", "weight", "grad_output"], ...] = ("input", "weight", "grad_output")
"""Columns of a module, in order; its output and grad_input are not quantized."""
_COUNTS = ("quantized", "saturated", "underflowed", "nonfinite")
PATIENCE_STEPS = 3
"""Steps without a forward after which a layer is reported as not observed."""
LOOK_AGAIN = 16
"""Steps between two searches of the model for layers that were added or removed."""


def _named_fp8(model: torch.nn.Module) -> dict[str, Fp8Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Fp8Linear)}


def _recipe_values(module: Fp8Linear) -> tuple[Any, ...]:
    recipe, forward = module.recipe, module.scaling_forward
    return recipe.amax_compute_algo, recipe.margin, len(forward.amax_history), forward.fmt, module.scaling_backward.fmt


class EmulatedSource:
    """Source for the `Fp8Linear` layers that `model` has at construction. Listening starts at once."""

    name = "emulation"

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._modules = _named_fp8(model)
        self._position = {module: i for i, module in enumerate(self._modules.values())}
        self._order = list(self._position)
        self._ever_run: set[Fp8Linear] = set()
        self._idle: set[Fp8Linear] = set()
        """Layers that have not run within the first `PATIENCE_STEPS` steps."""
        self._num_reads = 0
        self._columns_state: tuple[Any, ...] | None = None
        self._columns: list[TensorColumn] = []
        self._missing_state: tuple[Any, ...] | None = None
        self._missing: list[str] = []
        num = len(TENSORS) * len(self._modules)
        device = next((m.scaling_forward.scale.device for m in self._position), torch.device("cpu"))
        self._amax = torch.zeros(num, dtype=torch.float32, device=device)
        self._amax_last = torch.zeros(num, dtype=torch.float32, device=device)
        self._scale = torch.zeros(num, dtype=torch.float32, device=device)
        self._counts = torch.zeros(len(_COUNTS), num, dtype=torch.int64, device=device)
        self._squares = torch.zeros(2, num, dtype=torch.float32, device=device)
        self._has_run = [False] * num
        self._is_high_precision = [False] * num
        self._updates = {True: [0] * len(self._modules), False: [0] * len(self._modules)}
        self._is_counting = False
        self._what_if = WhatIfLog(num, device)
        self._step = OneStep()
        self.meters: Mapping[Kind, CostMeter] | None = None
        """Times what-if work. Element counts are not timed: they are part of the emulated cast."""
        self._routes: dict[tuple[bool, tuple[int, ...]], tuple[list[int], torch.Tensor, torch.Tensor]] = {}
        add_tap(self)

    def columns(self) -> Sequence[TensorColumn]:
        """Three per module: input, weight, grad_output, with the current recipe values. Layers that have not run in the
        first steps have no columns until they run; `not_observable` names them.

        The same object as long as nothing has changed.
        """
        state = (len(self._idle), [_recipe_values(module) for module in self._order])
        if state != self._columns_state:
            self._columns_state, self._columns = state, self._make_columns()
        return self._columns

    def _make_columns(self) -> list[TensorColumn]:
        return [
            TensorColumn(
                module=name,
                tensor=tensor,
                block=block_of(name),
                fp8_format=(module.scaling_backward if tensor == "grad_output" else module.scaling_forward).fmt.name,
                history_len=module.scaling_forward.amax_history.shape[0],
                amax_compute_algo=module.recipe.amax_compute_algo,
                margin=module.recipe.margin,
                source="tapped",
            )
            for name, module in self._modules.items()
            if module not in self._idle
            for tensor in TENSORS
        ]

    def not_observable(self) -> Sequence[str]:
        """Layers that have not run, and those removed from or added to the model after attach.

        The model is searched in each of the first `LOOK_AGAIN` steps and then once in `LOOK_AGAIN` steps.
        """
        state = (len(self._idle), self._num_reads if self._num_reads < LOOK_AGAIN else self._num_reads // LOOK_AGAIN)
        if state != self._missing_state:
            self._missing_state, self._missing = state, self._look_for_missing()
        return self._missing

    def _look_for_missing(self) -> list[str]:
        now = _named_fp8(self._model)
        gone = [f"{name}: no longer in the model" for name, mod in self._modules.items() if now.get(name) is not mod]
        new = [f"{name}: converted after attach" for name, mod in now.items() if mod not in self._position]
        idle = [f"{name}: has not run in training since attach" for name, m in self._modules.items() if m in self._idle]
        return gone + new + idle

    def begin(self, *, with_statistics: bool) -> None:
        """Start an optimizer step."""
        self._is_counting = with_statistics
        for values in (self._amax, self._amax_last, self._counts, self._squares):
            values.zero_()
        remove_value_tap(self)
        self._what_if.begin(frozenset())
        self._has_run = [False] * len(self._has_run)
        self._updates = {direction: [0] * len(self._modules) for direction in (True, False)}
        self._step.begin()

    def look_closer(self, modules: Sequence[str] | None) -> bool:
        """See `fp8watch.capture.closer.LooksCloser`."""
        names = set(self._modules if modules is None else modules)
        self._what_if.begin(
            frozenset(
                position * len(TENSORS) + tensor
                for position, name in enumerate(self._modules)
                for tensor in range(len(TENSORS))
                if name in names
            )
        )
        add_value_tap(self)
        return True

    def read(self) -> Reading | None:
        """This step's numbers. A layer in BF16 has a measured amax but no valid scale, because none was used."""
        if not self._step.is_begun:
            return None
        if not any(self._has_run):
            return None
        self._step.end()
        self._num_reads += 1
        if self._num_reads >= PATIENCE_STEPS:
            self._idle = {module for module in self._position if module not in self._ever_run}
        device = self._amax.device
        has_run = torch.tensor(self._has_run, device=device)
        high_precision = torch.tensor(self._is_high_precision, device=device)
        was_cast = has_run & ~high_precision
        values = {
            "amax": self._amax,
            "amax_last": self._amax_last,
            "scale": self._scale,
            "high_precision": high_precision.to(torch.uint8),
        }
        valid = {"amax": has_run, "amax_last": has_run, "scale": was_cast, "high_precision": has_run}
        if self._is_counting:
            values.update(zip(_COUNTS, self._counts, strict=True))
            error, signal = self._squares
            values["mse"] = error / self._counts[0].clamp(min=1)
            values["snr"] = 10.0 * torch.log10(signal / error)
            counted = was_cast & (self._counts[0] > 0)
            valid.update(dict.fromkeys((*_COUNTS, "mse", "snr"), counted))
        if (closer := self._what_if.columns()) is not None:
            values.update(closer[0])
            valid.update(dict.fromkeys(closer[0], closer[1] & was_cast))
        if self._idle:
            shown = [
                column for column in range(len(self._has_run)) if self._order[column // len(TENSORS)] not in self._idle
            ]
            index = torch.tensor(shown, dtype=torch.int64, device=device)
            values = {name: tensor[index] for name, tensor in values.items()}
            valid = {name: tensor[index] for name, tensor in valid.items()}
        return Reading(
            values=values,
            valid=valid,
            updates_forward=max(self._updates[True]),
            updates_backward=max(self._updates[False]),
        )

    def detach(self) -> None:
        """Stop listening."""
        remove_tap(self)
        remove_value_tap(self)

    def wants_statistics(self, module: Fp8Linear) -> bool:
        """Tap: whether this step is sampled."""
        return self._is_counting and module in self._position

    def on_cast(
        self, module: Fp8Linear, tensor: int, *, high_precision: bool, statistics: CastStatistics | None
    ) -> None:
        """Tap: note that the layer ran, and add up the counts."""
        position = self._position.get(module)
        if position is None:
            return
        column = position * len(TENSORS) + tensor
        self._has_run[column] = True
        self._ever_run.add(module)
        self._is_high_precision[column] = high_precision
        if statistics is not None and self._is_counting:
            counts = torch.stack([getattr(statistics, name) for name in _COUNTS])
            squares = torch.stack([statistics.squared_error, statistics.squared_values])
            self._counts[:, column].add_(counts.to(self._counts.device))
            self._squares[:, column].add_(squares.to(self._squares.device))

    def on_values(
        self, module: Fp8Linear, tensor: int, *, values: torch.Tensor, scale: torch.Tensor, fmt: Fp8Format,
        amax: torch.Tensor,
    ) -> None:  # fmt: skip
        """Value tap: measure what the candidate recipes would do to this cast."""
        position = self._position.get(module)
        if position is None or not self._what_if.wants(position * len(TENSORS) + tensor):
            return
        try:
            with contextlib.nullcontext() if self.meters is None else self.meters["what_if"].piece():
                self._what_if.offer(position * len(TENSORS) + tensor, values=values, scale=scale, fmt=fmt, amax=amax)
        except Exception:
            _log.warning("fp8watch: what-if figures failed and are left out of this step", exc_info=True)
            self._what_if.begin(frozenset())

    def on_update(
        self, modules: Sequence[Fp8Linear], *, is_forward: bool, amax: torch.Tensor, scale: torch.Tensor
    ) -> None:
        """Tap: `amax` is reduced over ranks; `scale` was used by the casts before this update."""
        key = (is_forward, tuple(map(id, modules)))
        if key not in self._routes:
            self._routes[key] = self._route(modules, is_forward=is_forward)
        positions, source, target = self._routes[key]
        if not positions:
            return
        for position in positions:
            self._updates[is_forward][position] += 1
        newest = amax[source].to(self._amax.device)
        self._amax[target] = torch.maximum(self._amax[target], newest)
        self._amax_last[target] = torch.where(newest != 0, newest, self._amax_last[target])
        self._scale[target] = scale[source].to(self._scale.device)

    def _route(self, modules: Sequence[Fp8Linear], *, is_forward: bool) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        """Positions of our modules, indices of their elements in the update's vectors, and indices of our columns."""
        tensors = (0, 1) if is_forward else (2,)
        ours = [(i, self._position[module]) for i, module in enumerate(modules) if module in self._position]
        source = [i * len(tensors) + k for i, _ in ours for k in range(len(tensors))]
        target = [position * len(TENSORS) + tensor for _, position in ours for tensor in tensors]
        return (
            [position for _, position in ours],
            torch.tensor(source, dtype=torch.int64, device=self._amax.device),
            torch.tensor(target, dtype=torch.int64, device=self._amax.device),
        )
