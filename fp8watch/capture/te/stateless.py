"""Source for Transformer Engine's stateless recipes: current and block scaling, MXFP8 and NVFP4 (untested on hardware).

Listens to the GEMM calls (`gemm_tap`) of Linear, LayerNormLinear, LayerNormMLP and GroupedLinear, and keeps one element
of each operand's scales until the step ends; block formats are reduced to their worst block at once. A column holds the
largest amax of the step and the scale that belongs to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fp8watch.capture.blocks import block_of
from fp8watch.capture.cast_log import CastLog
from fp8watch.capture.source import Reading
from fp8watch.capture.te.gemm_tap import GemmTap, Role, gemm_tap
from fp8watch.capture.te.tensors import UNKNOWN_SCALE, TensorScales, read_scales
from fp8watch.capture.to_device import to_device
from fp8watch.formats import FORMATS
from fp8watch.records import TensorColumn

TENSORS: tuple[Role, ...] = ("input", "weight", "grad_output")
SETTLED = 2
"""Readings after which a module that has run forward must have run backward too."""


class TeStatelessSource:
    """A module's columns appear with its first GEMM. They are in the order of the model, then of the module's GEMMs."""

    name = "transformer_engine.stateless"

    def __init__(self, model: torch.nn.Module, *, tap: GemmTap | None = None) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._order = {name: i for i, name in enumerate(self._names.values())}
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._tap = tap or gemm_tap
        self._keys: list[tuple[str, int, Role]] = []
        """Module, GEMM, tensor of each column in order of discovery, which is its position in the log."""
        self._positions: dict[tuple[str, int, Role], int] = {}
        self._kinds: list[TensorScales] = []
        self._num_gemms: dict[str, int] = {}
        self._grouped: set[str] = set()
        self._late: list[tuple[int, torch.Tensor]] = []
        self._log = CastLog(0, self._device)
        self._calls: dict[int, int] = {}
        self._forward_done: set[int] = set()
        """Columns of inputs and weights seen in a forward of this step; none with reentrant recomputation."""
        self._columns: list[TensorColumn] = []
        self._shown = 0
        self._ordered: torch.Tensor | None = None
        self._facts: tuple[torch.Tensor, torch.Tensor] | None = None
        self._num_reads = 0
        self._unmatched: list[str] = []
        self._tap.subscribe(self._on_operand)

    @property
    def modules(self) -> set[str]:
        """Qualified names of the modules seen so far."""
        return {name for name, _, _ in self._keys}

    def columns(self) -> Sequence[TensorColumn]:
        """Known from the first reading on."""
        return self._columns

    def not_observable(self) -> Sequence[str]:
        """Modules whose gradients cannot be told apart. `TeSource` names those that were not seen at all."""
        return self._unmatched

    def begin(self, *, with_statistics: bool) -> None:
        """Start an optimizer step."""
        self._log.clear()
        self._late.clear()
        self._calls.clear()
        self._forward_done.clear()

    def read(self) -> Reading | None:
        """This step's numbers. Tensors that did not run, or whose scale is unknown, count as not observed."""
        if not self._calls:
            return None
        self._num_reads += 1
        has_grown = len(self._keys) != self._shown
        if has_grown:
            self._grow()
        if self._tap.num_unmatched and self._num_reads >= SETTLED and (has_grown or self._num_reads == SETTLED):
            self._unmatched = list(self._without_gradient())
        worst, worst_last, _, has_cast = self._log.total()
        assert self._ordered is not None
        assert self._facts is not None
        worst, worst_last, has_cast = worst[self._ordered], worst_last[self._ordered], has_cast[self._ordered]
        fp8_max, has_scale = self._facts
        is_known = has_cast & ~(worst == 0)
        return Reading(
            values={"amax": worst * fp8_max, "amax_last": worst_last * fp8_max, "scale": worst.reciprocal()},
            valid={
                "amax": is_known,
                "amax_last": is_known & ~(worst_last == 0),
                "scale": is_known & has_scale,
            },
            updates_forward=self._most("input"),
            updates_backward=self._most("grad_output"),
        )

    def detach(self) -> None:
        """Stop listening."""
        self._tap.unsubscribe(self._on_operand)

    def _most(self, role: Role) -> int:
        return max((n for i, n in self._calls.items() if self._keys[i][2] == role), default=0)

    def _on_operand(self, module: Any, gemm: int, role: Role, operand: Any) -> None:
        name = self._names.get(module)
        if name is None:
            return  # another model's
        scales = read_scales(operand, raw=True)
        if scales is None:
            return
        key = (name, gemm, role)
        position = self._positions.get(key)
        if position is None:
            position = self._positions[key] = len(self._keys)
            self._keys.append(key)
            if any(base.__name__ == "GroupedLinear" for base in type(module).__mro__):
                self._grouped.add(name)
            self._kinds.append(scales)
            self._num_gemms[name] = max(self._num_gemms.get(name, 0), gemm + 1)
        elif (scales.recipe, scales.fp8_format) != (self._kinds[position].recipe, self._kinds[position].fp8_format):
            self._kinds[position], self._shown = scales, -1  # the recipe was changed
        if role != "grad_output":
            if torch._C._current_graph_task_id() == -1:
                self._forward_done.add(position)
            elif position in self._forward_done:
                return  # recomputed in the backward pass
        self._calls[position] = self._calls.get(position, 0) + 1
        if position < self._log.num:
            self._log.add(position, amax=scales.worst, scale=None, fp8_max=1.0)
        else:
            self._late.append((position, scales.worst))

    def _grow(self) -> None:
        """Columns were discovered in this step: make a larger log and put all columns in order."""
        ignored = [UNKNOWN_SCALE if kind.recipe == "current" else float("nan") for kind in self._kinds]
        unknown = to_device(torch.tensor(ignored, dtype=torch.float32, device="cpu"), self._device)
        log = CastLog(len(self._keys), self._device, ignored=unknown)
        log.take_over(self._log)
        for position, worst in self._late:
            log.add(position, amax=worst, scale=None, fp8_max=1.0)
        self._late.clear()
        self._log = log
        self._shown = len(self._keys)
        order = sorted(range(self._shown), key=self._rank)
        facts = [self._kinds[i] for i in order]
        self._columns = [self._column(self._keys[i], self._kinds[i]) for i in order]
        self._ordered = to_device(torch.tensor(order, dtype=torch.int64, device="cpu"), self._device)
        has_scale = [kind.recipe != "nvfp4" for kind in facts]
        fp8_max = [kind.fp8_max if known else 1.0 for kind, known in zip(facts, has_scale, strict=True)]
        self._facts = (
            to_device(torch.tensor(fp8_max, dtype=torch.float32, device="cpu"), self._device),
            to_device(torch.tensor(has_scale, device="cpu"), self._device),
        )

    def _without_gradient(self) -> Iterator[str]:
        trained = {name: any(p.requires_grad for p in m.parameters(recurse=False)) for m, name in self._names.items()}
        for name in self._num_gemms:
            roles = {role for owner, _, role in self._keys if owner == name}
            if trained[name] and "grad_output" not in roles:
                yield f"{name}: its gradients cannot be told apart: its weight is cast again in the backward pass"

    def _rank(self, position: int) -> tuple[int, int, int]:
        name, gemm, role = self._keys[position]
        return self._order[name], gemm, TENSORS.index(role)

    def _column(self, key: tuple[str, int, Role], kind: TensorScales) -> TensorColumn:
        name, gemm, role = key
        if self._num_gemms[name] > 1:
            name = f"{name}.gemm_{gemm}" if name in self._grouped else f"{name}.fc{gemm + 1}"
        assert kind.fp8_format in FORMATS
        return TensorColumn(
            module=name, tensor=role, block=block_of(name), fp8_format=kind.fp8_format, recipe=kind.recipe,
            source="tapped",
        )  # fmt: skip
