"""Source for torchao float8 training: amax and scale of every cast of every `Float8Linear`.

Eager layers are tapped (`taps`), compiled ones note their own amax (`compiled`). A cast is matched to its layer by the
identity of the layer's `linear_mm_config`, which torchao makes for each layer and passes to every cast, forward and
backward. Only amax and scale of a tensor are kept.

A scale belongs to one cast. A column holds the largest amax of the step and the scale made from it, which is the
smallest: of the worst row with rowwise scales, of the worst micro-batch with several. A layer that has not run has no
column and is named; it never appears as zeros.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from fp8watch.capture.blocks import block_of
from fp8watch.capture.cast_log import CastLog
from fp8watch.capture.cost_meter import CostMeter
from fp8watch.capture.governor import Kind
from fp8watch.capture.host_flags import HostFlags
from fp8watch.capture.source import OneStep, Reading
from fp8watch.capture.statistics import COUNTS, TensorStatistics, count
from fp8watch.capture.statistics.block_scales import BlockStatistics, block_statistics, spread_log2
from fp8watch.capture.statistics.count import format_of
from fp8watch.capture.torchao.compiled import CompiledNotes
from fp8watch.capture.torchao.scales import CastRecipe, ScaleRule, cast_recipe, is_float8_linear
from fp8watch.capture.torchao.taps import Phase, taps
from fp8watch.capture.what_if import WhatIfLog
from fp8watch.emulation.cast import measure_amax
from fp8watch.records import TensorColumn

TENSORS: tuple[Literal["input", "weight", "grad_output"], ...] = ("input", "weight", "grad_output")

LOOK_AGAIN_EVERY = 64
"""Steps between two searches of the model for layers that were added or removed."""


class TorchaoSource:
    """Source for the `Float8Linear` layers that `model` has at construction. Listening starts at once.

    Raises `ImportError` or `AttributeError` if this torchao lacks the expected functions.
    """

    name = "torchao.float8"

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._names = {module: name for name, module in model.named_modules() if is_float8_linear(module)}
        self._modules: list[Any] = list(self._names)
        owners: dict[int, list[int]] = {}
        for i, module in enumerate(self._modules):
            owners.setdefault(id(module.linear_mm_config), []).append(i)
        self._position = {owner: indices[0] for owner, indices in owners.items() if len(indices) == 1}
        self._ambiguous = {i for indices in owners.values() if len(indices) > 1 for i in indices}
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        num = len(TENSORS) * len(self._modules)
        self._log = CastLog(num, self._device)
        self._rule = ScaleRule(self._modules, TENSORS, self._device)
        self._counts = torch.zeros(len(COUNTS), num, dtype=torch.int64, device=self._device)
        self._squares = torch.zeros(2, num, dtype=torch.float32, device=self._device)
        self._blocks = torch.zeros(2, num, dtype=torch.int64, device=self._device)
        """Number of row or column scales, and how many of those rows or columns clip."""
        self._scale_range = torch.zeros(2, num, dtype=torch.float32, device=self._device)
        """Largest and smallest of those scales."""
        self._has_blocks = False
        self._is_counting = False
        self.meters: Mapping[Kind, CostMeter] | None = None
        """Times the sampling work; see `fp8watch.capture.closer`."""
        self._what_if = WhatIfLog(num, self._device)
        self._step = OneStep()
        self._is_high_precision = [False] * num
        self._calls: dict[Phase, list[int]] = {}
        self._gradients = [0] * len(self._modules)
        self._recipes: list[tuple[Any, CastRecipe] | None] = [None] * len(self._modules)
        self._seen: set[int] = set()
        """Modules that have ever run eagerly, as seen by the tap."""
        self._was_compiled: set[int] = set()
        """Modules whose graph has ever noted something; known one step late on an accelerator."""
        self._flags = HostFlags()
        self._shown: list[int] = []
        self._columns: list[TensorColumn] = []
        self._shown_as: object = None
        self._index: torch.Tensor | None = None
        self._num_reads = 0
        self._missing: list[str] = []
        self._looked_at: object = None
        self._notes = CompiledNotes(self._modules)
        self.begin(with_statistics=False)
        try:
            taps.add(self)
        except Exception:
            self._notes.remove()
            raise

    def columns(self) -> Sequence[TensorColumn]:
        """Three per layer that has run: input, weight, grad_output. Known from the first reading on."""
        return self._columns

    def not_observable(self) -> Sequence[str]:
        """Layers that have not run, that were removed or added later, or that cannot be told apart.

        The model is searched when the columns have changed, and once in `LOOK_AGAIN_EVERY` steps.
        """
        due = (self._num_reads // LOOK_AGAIN_EVERY, min(self._num_reads, 1), self._shown_as)
        if due != self._looked_at:
            self._looked_at = due
            self._missing = list(self._look_for_missing())
        return self._missing

    def _look_for_missing(self) -> Iterator[str]:
        now = {module: name for name, module in self._model.named_modules() if is_float8_linear(module)}
        yield from (f"{name}: no longer in the model" for module, name in self._names.items() if module not in now)
        yield from (f"{name}: converted after attach" for module, name in now.items() if module not in self._names)
        if self._num_reads == 0:
            return
        shown = set(self._shown)
        for i, module in enumerate(self._modules):
            if i in self._ambiguous:
                yield f"{self._names[module]}: shares its linear_mm_config with another layer"
            elif i not in shown and module in now:
                yield (
                    f"{self._names[module]}: has not run in training since attach"
                    " (never called, or traced by torch.compile before attach: attach first)"
                )

    def begin(self, *, with_statistics: bool) -> None:
        """Start an optimizer step."""
        self._is_counting = with_statistics
        self._what_if.begin(frozenset())
        self._log.clear()
        if with_statistics:
            self._counts.zero_()
            self._squares.zero_()
            if self._has_blocks:
                self._blocks.zero_()
                self._scale_range[0], self._scale_range[1] = 0.0, torch.inf
        self._is_high_precision = [False] * len(self._is_high_precision)
        self._calls = {phase: [0] * len(self._modules) for phase in ("forward", "recompute")}
        self._gradients = [0] * len(self._modules)
        if self._may_be_compiled():
            self._notes.clear()
        self._step.begin()

    def look_closer(self, modules: Sequence[str] | None) -> bool:
        """See `fp8watch.capture.closer.LooksCloser`. Only eager layers are measured; compiled ones run no Python."""
        names = set(self._names.values() if modules is None else modules)
        chosen = [i for i, module in enumerate(self._modules) if self._names[module] in names]
        self._what_if.begin(frozenset(i * len(TENSORS) + k for i in chosen for k in range(len(TENSORS))))
        return bool(self._seen) or not self._was_compiled

    def read(self) -> Reading | None:
        """This step's numbers; None if no layer ran, or only compiled ones that are not known yet."""
        if not self._step.is_begun:
            return None
        self._num_reads += 1
        noted = self._notes.gather() if self._may_be_compiled() else None
        if noted is not None:
            self._flags.offer((~(noted[0] < 0)).view(len(self._modules), len(TENSORS)).any(1))
        if (flags := self._flags.take()) is not None:
            self._was_compiled |= {i for i, flag in enumerate(flags) if flag and i not in self._ambiguous}
        self._show()
        if not self._shown or not (self._log or self._was_compiled):
            return None
        self._step.end()
        amax, amax_last, scale, has_cast = self._log.total()
        was_cast = has_cast & (scale < torch.inf)
        high_precision = torch.tensor(self._is_high_precision, device="cpu", pin_memory=self._device.type == "cuda")
        high_precision = high_precision.to(self._device, non_blocking=True)
        if noted is not None:
            # The values of a tapped cast are preferred. The scale of a compiled layer is computed from its amax.
            notes, precision = noted
            by_graph = ~(notes < 0) & ~has_cast
            amax, amax_last = torch.where(by_graph, notes, amax), torch.where(by_graph, notes, amax_last)
            scale = torch.where(by_graph, self._rule.scale(notes), scale)
            high_precision = torch.where(by_graph, precision == 1, high_precision)
            has_cast, was_cast = has_cast | by_graph, was_cast | (by_graph & self._rule.is_cast & (precision == 0))
        values = {
            "amax": amax,
            "amax_last": amax_last,
            "scale": scale,
            "high_precision": high_precision.to(torch.uint8),
        }
        valid = {"amax": has_cast, "amax_last": has_cast, "scale": was_cast, "high_precision": has_cast}
        if self._is_counting:
            error, signal = self._squares
            values |= dict(zip(COUNTS, self._counts, strict=True))
            values |= {"mse": error / self._counts[0].clamp(min=1), "snr": 10.0 * torch.log10(signal / error)}
            valid |= dict.fromkeys((*COUNTS, "mse", "snr"), self._counts[0] > 0)
            if self._has_blocks:
                values |= {"blocks": self._blocks[0], "clipped_blocks": self._blocks[1]}
                values["scale_spread"] = spread_log2(self._scale_range[0], self._scale_range[1])
                valid |= dict.fromkeys(("blocks", "clipped_blocks", "scale_spread"), self._blocks[0] > 0)
        if (closer := self._what_if.columns()) is not None:
            values |= closer[0]
            valid |= dict.fromkeys(closer[0], closer[1] & was_cast)
        if self._index is not None:
            values = {name: tensor[self._index] for name, tensor in values.items()}
            valid = {name: tensor[self._index] for name, tensor in valid.items()}
        return Reading(
            values=values,
            valid=valid,
            updates_forward=max(*self._calls["forward"], 0) or max(*self._calls["recompute"], 0) or 1,
            updates_backward=max([self._num_backward(i) for i in range(len(self._modules))]) or 1,
        )

    def detach(self) -> None:
        """Stop listening and remove the notes from the layers."""
        taps.remove(self)
        self._notes.remove()

    def _may_be_compiled(self) -> bool:
        return bool(self._was_compiled) or len(self._seen) < len(self._modules)

    # --- tap --------------------------------------------------------------------------------------

    def on_cast(
        self, owner: int, role: str, phase: Phase, *, amax: torch.Tensor | None, scale: torch.Tensor,
        values: torch.Tensor, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """See `fp8watch.capture.torchao.taps.Tap`."""
        i = self._position.get(owner)
        if i is None or phase == "evaluation" or role not in TENSORS:
            return
        column = i * len(TENSORS) + TENSORS.index(role)
        is_first = self._note_call(i, role, phase)
        self._log.add(column, amax=amax, scale=scale, fp8_max=torch.finfo(dtype).max)
        if self._is_counting and is_first:
            with self._timed("statistics"):
                self._add(column, count(values, scale, dtype))
                if (blocks := block_statistics(values, scale, format_of(dtype))) is not None:
                    self._add_blocks(column, blocks)
        if is_first and self._what_if.wants(column):
            known = amax if amax is not None and amax.numel() == 1 and not hasattr(amax, "to_local") else None
            with self._timed("what_if"):
                self._what_if.offer(column, values=values, scale=scale, fmt=format_of(dtype), amax=known)

    def _timed(self, kind: Kind) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.meters is None else self.meters[kind].piece()

    def on_high_precision(self, owner: int, role: str, phase: Phase, values: torch.Tensor) -> None:
        """See `fp8watch.capture.torchao.taps.Tap`."""
        i = self._position.get(owner)
        if i is None or phase == "evaluation" or role not in TENSORS:
            return
        column = i * len(TENSORS) + TENSORS.index(role)
        self._note_call(i, role, phase)
        self._is_high_precision[column] = True
        self._log.add(column, amax=measure_amax(values), scale=None, fp8_max=1.0)

    def _note_call(self, i: int, role: str, phase: Phase) -> bool:
        """Count the call. Returns whether this cast's elements should be counted in this micro-batch.

        Each operand is cast once per GEMM that it takes part in, and again by a recomputation, which may be the only
        forward with gradients there is (reentrant checkpointing).
        """
        self._seen.add(i)
        if role == "grad_output":
            self._gradients[i] += 1
            return (self._gradients[i] - 1) % max(self._recipe(i).gradient_casts, 1) == 0
        if phase in self._calls and role == "input":
            self._calls[phase][i] += 1
        return phase == "forward" or (phase == "recompute" and self._calls["forward"][i] == 0)

    def _num_backward(self, i: int) -> int:
        return -(-self._gradients[i] // max(self._recipe(i).gradient_casts, 1))

    def _recipe(self, i: int) -> CastRecipe:
        config = self._modules[i].config
        known = self._recipes[i]
        if known is None or known[0] is not config:
            known = self._recipes[i] = (config, cast_recipe(self._modules[i]))
        return known[1]

    def _add(self, column: int, statistics: TensorStatistics) -> None:
        counts = torch.stack([getattr(statistics, name) for name in COUNTS])
        squares = torch.stack([statistics.squared_error, statistics.squared_values])
        self._counts[:, column].add_(counts.to(self._device))
        self._squares[:, column].add_(squares.to(self._device))

    def _add_blocks(self, column: int, found: BlockStatistics) -> None:
        if not self._has_blocks:
            self._has_blocks = True
            self._scale_range[1] = torch.inf
        self._blocks[:, column].add_(torch.stack([found.blocks, found.clipped_blocks]).to(self._device))
        largest, smallest = self._scale_range[:, column]
        torch.maximum(largest, found.largest.to(self._device), out=largest)
        torch.minimum(smallest, found.smallest.to(self._device), out=smallest)

    # --- layout -----------------------------------------------------------------------------------

    def _show(self) -> None:
        """Columns of the layers seen so far; the same list as long as nothing has changed."""
        state = (
            frozenset(self._seen),
            frozenset(self._was_compiled),
            tuple(id(module.config) for module in self._modules),
        )
        if state == self._shown_as:
            return
        self._shown_as = state
        self._shown = [i for i in range(len(self._modules)) if i in self._seen or i in self._was_compiled]
        self._rule = ScaleRule(self._modules, TENSORS, self._device)
        self._columns = [self._column(i, tensor) for i in self._shown for tensor in TENSORS]
        self._index = None
        if len(self._shown) < len(self._modules):
            kept = [i * len(TENSORS) + k for i in self._shown for k in range(len(TENSORS))]
            pinned = torch.tensor(kept, dtype=torch.int64, device="cpu", pin_memory=self._device.type == "cuda")
            self._index = pinned.to(self._device, non_blocking=True)

    def _column(self, i: int, tensor: Literal["input", "weight", "grad_output"]) -> TensorColumn:
        name = self._names[self._modules[i]]
        return TensorColumn(
            module=name,
            tensor=tensor,
            block=block_of(name),
            fp8_format=self._recipe(i).formats[tensor],
            recipe="current",
            source="tapped" if i in self._seen else "measured",
        )
