"""Element counts of Transformer Engine's casts on sampled steps: underflow, saturation, non-finite, MSE, SNR.

A cast is matched to its column by its quantizer: with delayed scaling by the address of the scale it uses (a view of
the module's vector), else by the identity of the quantizer in the module's list. The real result is counted: the FP8
bytes are compared with the source and the scale of the same cast. Formats with one scale per block (block scaling,
MXFP8, NVFP4) are not counted; their columns stay "not observed".

On a GPU this takes one launch per cast; elsewhere, and without Triton, torch counts. The host's time matters: a layer
makes twelve casts, between operations that leave nothing of ours in the caches. So a quantizer that was met before
leads to its row at once, and a cast like the row's last one is launched at once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch

from fp8watch.capture.cost_meter import UNTIMED, CostMeter
from fp8watch.capture.governor import Kind
from fp8watch.capture.ring import is_capturing
from fp8watch.capture.source import Reading
from fp8watch.capture.statistics.count import count_made
from fp8watch.capture.te.cast_columns import CastColumns
from fp8watch.capture.te.cast_launch import repeat
from fp8watch.capture.te.cast_rows import CastRow, CastRows, Key
from fp8watch.capture.te.cast_tap import CastTap
from fp8watch.capture.te.fused_casts import FusedCasts
from fp8watch.capture.te.slots import slot_names
from fp8watch.capture.te.states import delayed_states, element_names, metas, quantizers_of
from fp8watch.capture.te.tensors import format_name, scale_of
from fp8watch.capture.triton_launch import is_hooked
from fp8watch.capture.what_if import WhatIfLog
from fp8watch.formats import FORMATS, Fp8Format
from fp8watch.records import TensorColumn

logger = logging.getLogger(__name__)


class TeStatistics:
    """Counts casts into `CastRows`, which are cleared at the start of each sampled step."""

    def __init__(self, model: torch.nn.Module, *, extension: Any | None = None) -> None:
        self._model = model
        self._tap = CastTap(extension, self)
        self._kernel: Any = _kernel()
        self._fused = _fused_casts(self._kernel)
        self._by_scale: dict[int, Key] = {}
        self._by_quantizer: dict[int, tuple[Any, Key]] = {}
        self._met: dict[int, tuple[Any, CastRow]] = {}
        """By identity: quantizers of `_by_quantizer` that have made a cast, which is kept in the row."""
        self._lock = threading.Lock()
        self._has_looked = False
        self.rows: CastRows | None = None
        """Counters of this step's casts. None before the first cast, which determines the device."""
        self._columns = CastColumns()
        self._has_said_device = False
        self._formats: dict[Any, Fp8Format] = {}
        """By TE's dtype code."""
        self.meters: Mapping[Kind, CostMeter] | None = None
        self._numbers: Iterator[int] = count(1)
        self._every = 1
        """Numbers of this step's pieces, and which are timed: see `CostMeter.numbers`."""
        self._is_sampled = False
        self._is_capturing: Callable[[], bool] = is_capturing
        self._what_if: WhatIfLog | None = None
        self._looked_at: frozenset[str] | None = frozenset()
        """Modules with what-if figures in this step; None: all."""
        self.is_looking = False
        """Whether there are any."""

    def look_closer(self, modules: Sequence[str] | None) -> bool:
        """See `fp8watch.capture.closer.LooksCloser`. Call it after `begin`; possible in a sampled step only."""
        self._looked_at = None if modules is None else frozenset(modules)
        self.is_looking = self._looked_at != frozenset()
        return self._is_sampled

    def begin(self, *, is_sampled: bool) -> None:
        """Start a step."""
        was_sampled, self._is_sampled = self._is_sampled, False
        # Until everything below has succeeded: old counts must not be taken for this step's.
        if not is_sampled and not was_sampled:
            self._tap.leave()
            return
        self._looked_at, self.is_looking = frozenset(), False
        if self._what_if is not None:
            self._what_if.begin(None)
        if not is_sampled or self._tap.num_failures:
            self._tap.leave()
            if self.rows is not None:
                self.rows.release()
            return
        self._has_looked = False
        if self.rows is not None:
            self.rows.clear()
            if self._kernel is not None and is_hooked():
                for row in self.rows:
                    row.last = None
        if self._fused is not None:
            self._fused.begin()
        if self.meters is not None:
            self._numbers, self._every = self.meters["statistics"].numbers()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", is_capturing)
        self._tap.listen()
        self._is_sampled = True

    @property
    def is_listening(self) -> bool:
        """Whether any wrapper is in place, also one that could not be taken out because another one lies over it."""
        return self._tap.is_in_place

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
            return self._columns.add_to(reading, columns(), self.rows, self._what_if)

    # --- tap --------------------------------------------------------------------------------------

    def on_cast(self, source: torch.Tensor, quantizer: Any, made: Any) -> None:
        """Count one cast, on the thread and stream that made it."""
        row = self.row_of(quantizer, made)
        if row is None:
            return
        if not next(self._numbers) % self._every and self.meters is not None:
            with self.meters["statistics"].timed():
                self.count(row, source, made)
        elif not repeat(row, source, made._data, made):
            self._count(row, source, made)
        if self.is_looking:
            self.look(row, source, made)

    def row_of(self, quantizer: Any, made: Any) -> CastRow | None:
        """The row that a cast of this quantizer, just made, is counted in. None: it is not counted."""
        try:
            if made._data is None or self._is_capturing():
                return None
        except AttributeError:
            return None  # no format with one scale per tensor
        is_in_backward = _graph_task_id() != -1
        # Training, not evaluation. Grad mode does not tell: it is off inside autograd functions.
        if not is_in_backward and not self._model.training:
            return None
        met = self._met.get(id(quantizer))
        row = met[1] if met is not None and met[0] is quantizer else self._row_of(quantizer, made)
        if row is None:
            return None
        if not is_in_backward:
            row.is_forward_done = True
        elif row.is_of_forward and row.is_forward_done:
            return None  # recomputed in the backward pass
        return row

    def count_inside(
        self, row: CastRow, name: str, args: Sequence[Any], options: dict[str, Any], result: Any, made: Any
    ) -> bool:
        """Count a cast that a function has made inside from the function's inputs. False: its source is needed."""
        fused = self._fused
        if fused is None or self.is_looking or not fused.knows(name):
            return False
        if next(self._numbers) % self._every or self.meters is None:
            return fused.count(row, name, args, options, result, made)
        with self.meters["statistics"].timed():
            return fused.count(row, name, args, options, result, made)

    def try_out(
        self, name: str, args: Sequence[Any], options: dict[str, Any], result: Any, source: torch.Tensor, made: Any
    ) -> None:
        """See `FusedCasts.try_out`."""
        if self._fused is not None and self.rows is not None and source.device == self.rows.device:
            with torch.no_grad():
                self._fused.try_out(name, args, options, result, source, made, self._format(made._fp8_dtype))

    def count_again(
        self, row: CastRow, made: Any, function: Callable[..., Any], args: Sequence[Any], options: dict[str, Any],
        is_first: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Count a cast whose source is what this call returns, and return the source.

        `is_first`: it is the first of what the call returns.
        """
        if _is_grad_enabled():  # which it is not inside autograd functions, where casts are made
            with torch.no_grad():
                return self.count_again(row, made, function, args, options, is_first)
        source: torch.Tensor
        if not next(self._numbers) % self._every and self.meters is not None:
            with self.meters["statistics"].timed():
                source = function(*args, **options)[0] if is_first else function(*args, **options)
                self.count(row, source, made)
        else:  # the same in this one frame
            source = function(*args, **options)[0] if is_first else function(*args, **options)
            if not repeat(row, source, made._data, made):
                self._count(row, source, made)
        if self.is_looking:
            self.look(row, source, made)
        return source

    def count(self, row: CastRow, source: torch.Tensor, made: Any) -> None:
        """Count a cast whose row is known."""
        if not repeat(row, source, made._data, made):
            self._count(row, source, made)

    def _count(self, row: CastRow, values: torch.Tensor, made: Any) -> None:
        """Count a cast that is not like the row's last one."""
        found = self._parts(values, made)
        if found is None:
            return
        codes, inverse = found
        code = getattr(made, "_fp8_dtype", None)
        fmt = self._format(code)
        if codes.dtype != torch.uint8:
            codes = codes.view(torch.uint8)
        kernel = self._kernel
        with torch.no_grad():
            if kernel is None or not kernel.add(row, values, codes, inverse, fmt=fmt, code=code):
                counted = count_made(values.reshape(-1), scale_of(inverse).reshape(()), fmt, codes.reshape(-1))
                before = torch.count_nonzero(values)
                after = before - counted.underflowed
                row.counts[0] += torch.stack([counted.saturated, before, after, counted.nonfinite])
                row.sums[0] += torch.stack([counted.squared_error, counted.squared_values])
        row.elements += values.numel()

    def look(self, row: CastRow, source: torch.Tensor, made: Any) -> None:
        """Add the cast's what-if figures, if they are wanted of its module."""
        if self._looked_at is not None and row.key[0] not in self._looked_at:
            return
        found = self._parts(source, made)
        if found is None:
            return
        with UNTIMED if self.meters is None else self.meters["what_if"].piece(), torch.no_grad():
            log = self._what_if or self._new_log(source.device)
            scale, fmt = scale_of(found[1]).reshape(()), self._format(getattr(made, "_fp8_dtype", None))
            log.offer(row.number, values=source, scale=scale, fmt=fmt, amax=None)

    def _new_log(self, device: torch.device) -> WhatIfLog:
        with self._lock:
            if self._what_if is None:
                log = WhatIfLog(None, device)
                log.begin(None)
                self._what_if = log
            return self._what_if

    def _parts(self, source: torch.Tensor, made: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `_per_tensor`. None also on another device than that of the rows."""
        assert self.rows is not None
        if source.device == self.rows.device:
            return _per_tensor(made)
        self._on_another_device(source.device, self.rows.device)
        return None

    def _on_another_device(self, device: torch.device, counted: torch.device) -> None:
        """Only one device is counted: a kernel must not get addresses of another's memory, and such models are rare."""
        if not self._has_said_device:
            self._has_said_device = True
            logger.warning("fp8watch: casts on %s are not counted, only those on %s", device, counted)

    def _format(self, code: Any) -> Fp8Format:
        found = self._formats.get(code)
        if found is None:
            found = self._formats[code] = FORMATS[format_name(code)]
        return found

    def _row_of(self, quantizer: Any, made: Any) -> CastRow | None:
        """The row of a quantizer that was not met before. Under a lock, because two threads may meet theirs."""
        with self._lock:
            key = self._key_of(quantizer)
            found = None if key is None else _per_tensor(made)
            if key is None or found is None:
                return None
            if self.rows is None:
                device, kernel = found[0].device, self._kernel
                self.rows = CastRows(device, 1 if kernel is None or device.type != "cuda" else kernel.PROGRAMS)
            row = self.rows.row(key)
            known = self._by_quantizer.get(id(quantizer))
            if known is not None and known[0] is quantizer:
                self._met[id(quantizer)] = (quantizer, row)
            return row

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
        self._met.clear()
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


_graph_task_id = torch._C._current_graph_task_id
_is_grad_enabled = torch.is_grad_enabled
"""Looked up once: torch's own tables are out of the caches between two casts."""


def _per_tensor(made: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The bytes of a cast with one scale, and its inverse. None: one scale per block, or only the transposed bytes."""
    codes, inverse = getattr(made, "_data", None), getattr(made, "_scale_inv", None)
    if not isinstance(codes, torch.Tensor) or not isinstance(inverse, torch.Tensor) or inverse.numel() != 1:
        return None
    return codes, inverse


def _kernel() -> Any:
    """The module with the Triton kernel, or None without Triton."""
    try:
        from fp8watch.capture.te import cast_kernel
    except ImportError:
        return None
    return cast_kernel


def _fused_casts(kernel: Any) -> FusedCasts | None:
    """None where casts are not counted by a kernel."""
    if kernel is None:
        return None
    from fp8watch.capture.te import fused_cast_kernel

    return FusedCasts(fused_cast_kernel, kernel)
