"""Transformer Engine's recipes without state: current and block scaling, and (untested on hardware) MXFP8, NVFP4.

Listens to the GEMM calls (`gemm_tap`) of Linear, LayerNormLinear and LayerNormMLP and keeps one element of each
operand's scales until the step ends; block formats are reduced to their worst block at once. A column shows the
largest amax of the step and the scale that belongs to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fp8watch.capture.blocks import block_of
from fp8watch.capture.cast_log import CastLog
from fp8watch.capture.source import Reading
from fp8watch.capture.te.gemm_tap import GemmTap, Role, gemm_tap
from fp8watch.capture.te.tensors import UNKNOWN_SCALE, TensorScales, read_scales
from fp8watch.formats import FORMATS
from fp8watch.records import TensorColumn

TENSORS: tuple[Role, ...] = ("input", "weight", "grad_output")


class TeStatelessSource:
    """Columns appear with the first GEMM of a module; the order is that of the model, then of its GEMMs."""

    name = "transformer_engine.stateless"

    def __init__(self, model: torch.nn.Module, *, tap: GemmTap | None = None) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._order = {name: i for i, name in enumerate(self._names.values())}
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._tap = tap or gemm_tap
        self._keys: list[tuple[str, int, Role]] = []
        """Module, GEMM, tensor of each column as it was first seen; positions in the log."""
        self._positions: dict[tuple[str, int, Role], int] = {}
        self._kinds: list[TensorScales] = []
        self._num_gemms: dict[str, int] = {}
        self._late: list[tuple[int, torch.Tensor]] = []
        self._log = CastLog(0, self._device)
        self._calls: dict[int, int] = {}
        self._columns: list[TensorColumn] = []
        self._shown = 0
        self._ordered: torch.Tensor | None = None
        self._facts: tuple[torch.Tensor, torch.Tensor] | None = None
        self._tap.subscribe(self._on_operand)

    @property
    def modules(self) -> set[str]:
        """Qualified names of the modules seen so far."""
        return {name for name, _, _ in self._keys}

    def columns(self) -> Sequence[TensorColumn]:
        """Known from the first reading on."""
        return self._columns

    def not_observable(self) -> Sequence[str]:
        """Nothing of its own: who has not been seen here is named by `TeSource`."""
        return []

    def begin(self, *, with_statistics: bool) -> None:
        """A new optimizer step."""
        self._log.clear()
        self._late.clear()
        self._calls.clear()

    def read(self) -> Reading | None:
        """This step's numbers; what did not run, or whose scale says nothing, counts as not observed."""
        if not self._calls:
            return None
        if len(self._keys) != self._shown:
            self._grow()
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
        """Leave the tap."""
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
            self._kinds.append(scales)
            self._num_gemms[name] = max(self._num_gemms.get(name, 0), gemm + 1)
        elif (scales.recipe, scales.fp8_format) != (self._kinds[position].recipe, self._kinds[position].fp8_format):
            self._kinds[position], self._shown = scales, -1  # the recipe was changed
        self._calls[position] = self._calls.get(position, 0) + 1
        if position < self._log.num:
            self._log.add(position, amax=scales.worst, scale=None, fp8_max=1.0)
        else:
            self._late.append((position, scales.worst))

    def _grow(self) -> None:
        """New columns were met in this step: a larger log, and the order in which they are shown."""
        ignored = [UNKNOWN_SCALE if kind.recipe == "current" else float("nan") for kind in self._kinds]
        log = CastLog(len(self._keys), self._device, ignored=self._on_device(torch.tensor(ignored, device="cpu")))
        log.take_over(self._log)
        for position, worst in self._late:
            log.add(position, amax=worst, scale=None, fp8_max=1.0)
        self._late.clear()
        self._log = log
        self._shown = len(self._keys)
        order = sorted(range(self._shown), key=self._rank)
        facts = [self._kinds[i] for i in order]
        self._columns = [self._column(self._keys[i], self._kinds[i]) for i in order]
        self._ordered = self._on_device(torch.tensor(order, dtype=torch.int64, device="cpu"))
        has_scale = [kind.recipe != "nvfp4" for kind in facts]
        fp8_max = [kind.fp8_max if known else 1.0 for kind, known in zip(facts, has_scale, strict=True)]
        self._facts = (
            self._on_device(torch.tensor(fp8_max, device="cpu")),
            self._on_device(torch.tensor(has_scale, device="cpu")),
        )

    def _rank(self, position: int) -> tuple[int, int, int]:
        name, gemm, role = self._keys[position]
        return self._order[name], gemm, TENSORS.index(role)

    def _on_device(self, values: torch.Tensor) -> torch.Tensor:
        if self._device.type != "cuda":
            return values.to(self._device)
        return values.pin_memory().to(self._device, non_blocking=True)

    def _column(self, key: tuple[str, int, Role], kind: TensorScales) -> TensorColumn:
        name, gemm, role = key
        if self._num_gemms[name] > 1:
            name = f"{name}.fc{gemm + 1}"
        assert kind.fp8_format in FORMATS
        return TensorColumn(
            module=name, tensor=role, block=block_of(name), fp8_format=kind.fp8_format, recipe=kind.recipe,
            source="tapped",
        )  # fmt: skip
