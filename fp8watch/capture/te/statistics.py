"""Element counts of Transformer Engine's casts on sampled steps: underflow, saturation, non-finite, MSE, SNR.

A cast is matched to its column by its quantizer: with delayed scaling by the address of the scale it uses (a view of
the module's vector), else by the identity of the quantizer in the module's list. The real result is counted: the FP8
bytes are compared with the source and the scale of the same cast. Formats with one scale per block (block scaling,
MXFP8, NVFP4) are not counted; their columns stay "not observed".

On a GPU this takes one launch per cast; elsewhere, and without Triton, torch counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from fp8watch.capture.cost_meter import CostMeter
from fp8watch.capture.governor import Kind
from fp8watch.capture.ring import is_capturing
from fp8watch.capture.source import Reading
from fp8watch.capture.statistics.count import count_made
from fp8watch.capture.te.cast_rows import CastRow, CastRows, Key
from fp8watch.capture.te.cast_tap import CastTap
from fp8watch.capture.te.slots import slot_names
from fp8watch.capture.te.states import delayed_states, element_names, metas, quantizers_of
from fp8watch.capture.te.tensors import format_name
from fp8watch.capture.what_if import WhatIfLog
from fp8watch.formats import FORMATS, Fp8Format
from fp8watch.records import TensorColumn

logger = logging.getLogger(__name__)


class TeStatistics:
    """Counts casts into `CastRows`, which are cleared at the start of each sampled step."""

    def __init__(self, model: torch.nn.Module, *, extension: Any | None = None) -> None:
        self._model = model
        self._tap = CastTap(extension, self._on_cast, self._wants)
        self._kernel: Any = _kernel()
        self._by_scale: dict[int, Key] = {}
        self._by_quantizer: dict[int, tuple[Any, Key]] = {}
        self._has_looked = False
        self.rows: CastRows | None = None
        """Counters of this step's casts. None before the first cast, which determines the device."""
        self._has_said_device = False
        self._formats: dict[Any, Fp8Format] = {}
        """By TE's dtype code."""
        self.meters: Mapping[Kind, CostMeter] | None = None
        self._is_sampled = False
        self._what_if: WhatIfLog | None = None
        self._looked_at: frozenset[str] | None = frozenset()
        """Modules with what-if figures in this step; None: all."""

    def look_closer(self, modules: Sequence[str] | None) -> bool:
        """See `fp8watch.capture.closer.LooksCloser`. Call it after `begin`; possible in a sampled step only."""
        self._looked_at = None if modules is None else frozenset(modules)
        return self._is_sampled

    def begin(self, *, is_sampled: bool) -> None:
        """Start a step."""
        if not is_sampled and not self._is_sampled:  # like the previous step
            self._tap.leave()
            return
        self._looked_at = frozenset()
        if self._what_if is not None:
            self._what_if.begin(None)
        self._is_sampled = is_sampled and not self._tap.num_failures
        if not self._is_sampled:
            self._tap.leave()
            return
        self._has_looked = False
        if self.rows is not None:
            self.rows.clear()
        self._tap.listen()

    def detach(self) -> None:
        """Stop listening."""
        self._tap.leave()

    def add_to(self, reading: Reading | None, columns: Callable[[], Sequence[TensorColumn]]) -> Reading | None:
        """The step's reading with its counts. On a step that is not sampled: unchanged, and `columns` is not called."""
        if not self._is_sampled:
            return reading
        self._tap.leave()
        if reading is None or self.rows is None or not any(row.elements for row in self.rows):
            return reading
        with torch.no_grad():
            return self._with_counts(reading, columns(), self.rows)

    def _with_counts(self, reading: Reading, columns: Sequence[TensorColumn], rows: CastRows) -> Reading:
        counts, sums = rows.counts, rows.sums
        device = counts.device
        found = [rows.get((column.module, column.tensor)) for column in columns]
        places = [0 if row is None else row.number for row in found]
        facts = torch.tensor(
            [places, [0 if row is None else row.elements for row in found]], dtype=torch.int64, device="cpu"
        )
        if device.type == "cuda":
            facts = facts.pin_memory().to(device, non_blocking=True)
        index, quantized = facts
        was_seen = quantized > 0
        saturated, before, after, nonfinite = counts.sum(1, dtype=torch.int64)[index].unbind(1)
        error, square = sums.sum(1)[index].unbind(1)
        values = {
            "quantized": quantized, "saturated": saturated, "underflowed": before - after, "nonfinite": nonfinite,
            "mse": error / quantized.clamp(min=1), "snr": 10.0 * torch.log10(square / error),
        }  # fmt: skip
        valid = dict.fromkeys(values, was_seen)
        if self._what_if is not None and (closer := self._what_if.columns()) is not None:
            values |= {name: held[index.clamp(max=len(held) - 1)] for name, held in closer[0].items()}
            looked_at = closer[1][index.clamp(max=len(closer[1]) - 1)] & (index < len(closer[1])) & was_seen
            valid |= dict.fromkeys(closer[0], looked_at)
        return Reading(
            values={**reading.values, **values},
            valid=reading.valid | valid,
            zero_is_unseen=reading.zero_is_unseen,
            updates_forward=reading.updates_forward,
            updates_backward=reading.updates_backward,
        )

    # --- tap --------------------------------------------------------------------------------------

    def _wants(self, quantizer: Any) -> bool:
        return self._key_of(quantizer) is not None and not is_capturing() and self._is_in_training()

    def _on_cast(self, source: torch.Tensor, quantizer: Any, made: Any) -> None:
        """Count one cast, on the thread and stream that made it."""
        codes, inverse = getattr(made, "_data", None), getattr(made, "_scale_inv", None)
        if not isinstance(codes, torch.Tensor) or not isinstance(inverse, torch.Tensor) or inverse.numel() != 1:
            return  # one scale per block, or only the transposed bytes
        key = self._key_of(quantizer)
        if key is None or is_capturing() or not self._is_in_training():
            return
        if self.rows is None:
            programs = 1 if self._kernel is None or source.device.type != "cuda" else self._kernel.PROGRAMS
            self.rows = CastRows(source.device, programs)
        if source.device != self.rows.device:
            self._on_another_device(source.device, self.rows.device)
            return
        row = self.rows.row(key)
        if row.is_of_forward:
            if torch._C._current_graph_task_id() == -1:
                row.is_forward_done = True
            elif row.is_forward_done:
                return  # recomputed in the backward pass
        fmt = self._format(getattr(made, "_fp8_dtype", None))
        with _UNTIMED if self.meters is None else self.meters["statistics"].piece():
            self._count(row, source, codes, inverse, fmt)
        row.elements += source.numel()
        if self._looked_at is None or key[0] in self._looked_at:
            with _UNTIMED if self.meters is None else self.meters["what_if"].piece():
                if self._what_if is None:
                    self._what_if = WhatIfLog(0, source.device)
                    self._what_if.begin(None)
                scale = inverse.reciprocal().reshape(())
                self._what_if.offer(row.number, values=source, scale=scale, fmt=fmt, amax=None)

    def _on_another_device(self, device: torch.device, counted: torch.device) -> None:
        """Only one device is counted: a kernel must not get addresses of another's memory, and such models are rare."""
        if not self._has_said_device:
            self._has_said_device = True
            logger.warning("fp8watch: casts on %s are not counted, only those on %s", device, counted)

    def _is_in_training(self) -> bool:
        """Whether this is training, not evaluation. Grad mode does not tell: it is off inside autograd functions."""
        return self._model.training or torch._C._current_graph_task_id() != -1

    def _format(self, code: Any) -> Fp8Format:
        found = self._formats.get(code)
        if found is None:
            found = self._formats[code] = FORMATS[format_name(code)]
        return found

    def _count(
        self, row: CastRow, values: torch.Tensor, codes: torch.Tensor, inverse: torch.Tensor, fmt: Fp8Format
    ) -> None:
        if codes.dtype != torch.uint8:
            codes = codes.view(torch.uint8)
        if self._kernel is not None and self._kernel.add(row, values, codes, inverse, is_inverse=True, fmt=fmt):
            return
        found = count_made(values.reshape(-1), inverse.reciprocal().reshape(()), fmt, codes.reshape(-1))
        before = torch.count_nonzero(values)
        row.counts[0] += torch.stack([found.saturated, before, before - found.underflowed, found.nonfinite])
        row.sums[0] += torch.stack([found.squared_error, found.squared_values])

    def _key_of(self, quantizer: Any) -> Key | None:
        found = self._find(quantizer)
        if found is None and not self._has_looked:
            self._has_looked = True  # at most once per step, because other models' casts never match
            self._look()
            found = self._find(quantizer)
        return found

    def _find(self, quantizer: Any) -> Key | None:
        known = self._by_quantizer.get(id(quantizer))
        if known is not None and known[0] is quantizer:
            return known[1]
        scale = getattr(quantizer, "scale", None)
        if isinstance(scale, torch.Tensor) and scale.numel() == 1:
            return self._by_scale.get(scale.data_ptr())
        return None

    def _look(self) -> None:
        """Find the quantizers that the model's modules have now; a change of recipe replaces them."""
        self._by_scale.clear()
        self._by_quantizer.clear()
        for name, module, key, forward, state in delayed_states(self._model):
            start, size = state.scale.data_ptr(), state.scale.element_size()
            for i, slot in enumerate(element_names(module, name, key, state, forward=forward)):
                if slot is not None:
                    self._by_scale[start + i * size] = slot
        for name, module in self._model.named_modules():
            for key, forward, _ in metas(module):
                quantizers = quantizers_of(module, key)
                for quantizer, slot in zip(
                    quantizers, slot_names(module, name, forward=forward, num_slots=len(quantizers)), strict=True
                ):
                    if slot is not None:
                        self._by_quantizer[id(quantizer)] = (quantizer, slot)


_UNTIMED = nullcontext()


def _kernel() -> Any:
    """The module with the Triton kernel, or None without Triton."""
    try:
        from fp8watch.capture.te import cast_kernel
    except ImportError:
        return None
    return cast_kernel
