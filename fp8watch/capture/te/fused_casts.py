"""Casts that norms and activations make inside, counted from the inputs of these functions, on a GPU.

What a function computes is Transformer Engine's affair, so each formula is tried out in the training itself: the first
cast of a function is counted both from the result of a second call, which is always right, and from the inputs. The
numbers are compared in a later sampled step, when they have long been on the host. Until then, and for a function whose
numbers differ, the second call is made.

Importing this does not need Triton.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fp8watch.capture.te.cast_launch import ALIGNMENT
from fp8watch.capture.te.cast_rows import NUM_SUMS, CastRow, CastRows
from fp8watch.capture.triton_launch import Shortcut, is_hooked, shortcut
from fp8watch.formats import Fp8Format

logger = logging.getLogger(__name__)

_ACTIVATIONS = {"gelu": "gelu", "qgelu": "qgelu", "relu": "relu", "srelu": "srelu", "silu": "silu"}
_GATED = {"glu": "sigmoid", "geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}
FUNCTIONS = {
    "layernorm_fwd": ("layernorm", ""),
    "rmsnorm_fwd": ("rmsnorm", ""),
    **{name: ("activation", activation) for name, activation in _ACTIVATIONS.items()},
    **{f"d{name}": ("derivative", activation) for name, activation in _ACTIVATIONS.items()},
    **{f"dbias_d{name}": ("derivative", activation) for name, activation in _ACTIVATIONS.items()},
    **{name: ("gated", activation) for name, activation in _GATED.items()},
    **{f"d{name}": ("gated_derivative", activation) for name, activation in _GATED.items()},
}
"""Form and activation (see `fused_cast_kernel`) of functions of `transformer_engine_torch`. `gated`: made from the two
halves of each row, of which the first is activated."""
ZERO_CENTERED = {"layernorm_fwd": 8, "rmsnorm_fwd": 7}
"""Position of the argument that says that a norm's weight is one less than it counts."""
MOST_TRIALS = 3
"""Of a function whose casts cannot be launched or whose numbers do not tell, all zeros for example."""
LARGE = 2**30
"""From this number of elements on, positions need more than 32 bits; the second call is made."""
SQUARE_WITHIN, ERROR_WITHIN = 0.01, 0.02
"""By how much the two ways may differ: the second call's result is rounded to the model's dtype, which changes an error
of FP8 by about 0.1 %, where another formula changes all of it."""


class Operands(NamedTuple):
    """What the kernel reads, in its order; what a form does not need is its first input again."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    numel: int
    width: int
    """Elements in a row of the result."""
    run: int
    """Adjacent ones of a row that are made alike: half of it where the halves differ."""
    is_zero_centered: bool


class _Launch(NamedTuple):
    """A compiled kernel, and the casts that it counts."""

    run: Any
    """With its grid, by Triton."""
    constants: tuple[Any, ...]
    shortcut: Shortcut | None
    name: str
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    code: Any
    is_zero_centered: bool


class _Trial(NamedTuple):
    sums: torch.Tensor
    """float32 [2, NUM_SUMS], pinned: from the inputs, and from the second call."""
    event: torch.cuda.Event


class FusedCasts:
    """`kernel` and `reference`: the modules `fused_cast_kernel` and `cast_kernel`."""

    def __init__(self, kernel: Any, reference: Any) -> None:
        self._kernel, self._reference = kernel, reference
        self._is_right: dict[str, bool] = {}
        """By function; missing: not tried out yet."""
        self._trials: dict[str, _Trial] = {}
        """Those that are not over."""
        self._num_trials: Counter[str] = Counter()
        self._lock = threading.Lock()
        """For starting trials."""
        self._launches: dict[tuple[Any, ...], _Launch] = {}
        self._formats: dict[Any, Fp8Format] = {}
        """By TE's dtype code."""
        self._is_short = True

    def begin(self) -> None:
        """Start a sampled step: look at trials that are over."""
        self._is_short = not is_hooked()
        for name, trial in list(self._trials.items()):
            if trial.event.query():  # type: ignore[no-untyped-call]
                del self._trials[name]
                verdict = _is_same(trial.sums)
                if verdict is not None or self._num_trials[name] >= MOST_TRIALS:
                    self._is_right[name] = bool(verdict)
                if verdict is False:
                    logger.info("fp8watch: %s computes something else here; it is called again to be counted", name)

    def knows(self, name: str) -> bool:
        """Whether casts of this function can be counted from its inputs."""
        return self._is_right.get(name, False)

    def count(
        self, row: CastRow, name: str, args: Sequence[Any], options: dict[str, Any], result: Any, made: Any
    ) -> bool:
        """Count a cast of a function that is known. False: nothing was counted, the source is needed."""
        try:
            operands = operands_of(name, args, options, result)
            return operands is not None and self._add(row, name, operands, made)
        except Exception:
            logger.warning("fp8watch: %s is called again to be counted", name, exc_info=True)
            self._is_right[name] = False
            return False

    def try_out(
        self, name: str, args: Sequence[Any], options: dict[str, Any], result: Any, source: torch.Tensor, made: Any,
        fmt: Fp8Format,
    ) -> None:  # fmt: skip
        """Start the trial of a function, if it has had none. `source`: what its second call has returned."""
        if name in self._is_right or name in self._trials:
            return
        with self._lock:
            if name in self._is_right or name in self._trials:  # another thread was first
                return
            self._num_trials[name] += 1
            try:
                self._start_trial(name, args, options, result, source, made, fmt)
            except Exception:
                logger.warning("fp8watch: %s is called again to be counted", name, exc_info=True)
                self._is_right[name] = False
                return
            if name not in self._trials and self._num_trials[name] >= MOST_TRIALS:
                self._is_right[name] = False

    def _start_trial(
        self, name: str, args: Sequence[Any], options: dict[str, Any], result: Any, source: torch.Tensor, made: Any,
        fmt: Fp8Format,
    ) -> None:  # fmt: skip
        operands = operands_of(name, args, options, result)
        if operands is None:
            return
        self._formats[made._fp8_dtype] = fmt
        scratch = CastRows(source.device, self._reference.PROGRAMS)
        ours, theirs = scratch.row(("ours", name)), scratch.row(("theirs", name))
        if not self._add(ours, name, operands, made) or not self._reference.add(
            theirs, source, made._data, made._scale_inv, fmt=fmt
        ):
            return
        self._trials[name] = _to_host(scratch.totals()[1][:2])

    def _add(self, row: CastRow, name: str, operands: Operands, made: Any) -> bool:
        """Launch the kernel, as short as `cast_launch.repeat` does, if this cast is like the row's last one."""
        tensors, numel, width, run, is_zero_centered = operands
        first, second, third, mean, spread = tensors
        codes, inverse, code = made._data, made._scale_inv, made._fp8_dtype
        first_at, second_at, third_at = first.data_ptr(), second.data_ptr(), third.data_ptr()
        codes_at, mean_at, spread_at, inverse_at = (
            codes.data_ptr(), mean.data_ptr(), spread.data_ptr(), inverse.data_ptr()
        )  # fmt: skip
        each = self._kernel.EACH
        if (
            codes.numel() != numel or numel >= LARGE or numel % each or run % each
            or (first_at | second_at | third_at | codes_at) % ALIGNMENT
            # A tensor that only stands for others.
            or not (first_at and second_at and third_at and codes_at and mean_at and spread_at and inverse_at)
        ):  # fmt: skip
            return False
        known: _Launch | None = row.fused
        if (
            known is None or known.name != name or known.is_zero_centered is not is_zero_centered
            or (known.code is not code and known.code != code)
            or known.dtypes != (first.dtype, second.dtype, third.dtype)
        ):  # fmt: skip
            return self._add_first(row, name, operands, made)
        arguments = (
            first_at, second_at, third_at, mean_at, spread_at, codes_at, inverse_at, row.counts_at, row.sums_at,
            numel, width,
        )  # fmt: skip
        if known.shortcut is not None and self._is_short:
            launch, programs, function, cooperative, dependent, metadata, device, current_device, stream = (
                known.shortcut
            )  # fmt: skip
            if current_device is not None and current_device() != device:
                return False
            launch(  # see `cast_launch.repeat`
                programs, 1, 1, stream(device), function, cooperative, dependent, None, None, metadata,
                None, None, None, *arguments, *(None,) * len(known.constants),
            )  # fmt: skip
        elif codes.is_cuda and torch.cuda.current_device() != codes.get_device():
            return False
        else:
            known.run(*arguments, *known.constants)
        row.elements += numel
        return True

    def _add_first(self, row: CastRow, name: str, operands: Operands, made: Any) -> bool:
        tensors, numel, width, _, is_zero_centered = operands
        codes, fmt = made._data, self._formats.get(made._fp8_dtype)
        device = codes.get_device()
        if (
            fmt is None or codes.dtype != torch.uint8 or device != row.counts.get_device()
            or (codes.is_cuda and torch.cuda.current_device() != device)
            or made._scale_inv.numel() != 1 or made._scale_inv.dtype is not torch.float32
            or not all(tensor.dtype in self._kernel.SOURCES and type(tensor) in _PLAIN for tensor in tensors)
        ):  # fmt: skip
            return False
        dtypes = tensors[0].dtype, tensors[1].dtype, tensors[2].dtype
        kind = (name, dtypes, made._fp8_dtype, is_zero_centered, device)
        known = self._launches.get(kind)
        if known is not None:
            row.fused = known
            return self._add(row, name, operands, made)
        form, activation = FUNCTIONS[name]
        constants = self._kernel.constants(form, activation, fmt, is_zero_centered=is_zero_centered)
        compiled = self._kernel.launch(
            (*tensors, codes, made._scale_inv, row.counts, row.sums), numel, width, constants
        )  # fmt: skip
        row.elements += numel  # counted, whatever becomes of the next cast
        if hasattr(compiled, "packed_metadata") and not (row.counts_at | row.sums_at) % ALIGNMENT:
            try:
                programs = self._reference.PROGRAMS
                row.fused = self._launches[kind] = _Launch(
                    compiled[(programs, 1, 1)], constants, shortcut(compiled, programs, device), name, dtypes,
                    made._fp8_dtype, is_zero_centered,
                )  # fmt: skip
            except Exception:
                logger.warning("fp8watch: %s is called again to be counted", name, exc_info=True)
                self._is_right[name] = False
        return True


def operands_of(name: str, args: Sequence[Any], options: dict[str, Any], result: Any) -> Operands | None:
    """What the kernel needs, from a call's arguments and result. None: not as it is known, or not contiguous."""
    form = FUNCTIONS[name][0]
    first = args[0]
    numel, width = first.numel(), first.shape[-1]
    if form in ("layernorm", "rmsnorm"):
        at = ZERO_CENTERED[name]
        is_zero_centered = args[at] if len(args) > at else options.get("zero_centered_gamma")
        weight, mean, spread = args[1], result[1], result[2]
        bias = args[2] if form == "layernorm" else first
        mean = mean if form == "layernorm" else spread
        if (
            not isinstance(is_zero_centered, bool) or not isinstance(weight, _Tensor) or not isinstance(bias, _Tensor)
            or not isinstance(mean, _Tensor) or weight.numel() != width or (bias is not first and bias.numel() != width)
            or spread.dtype is not torch.float32 or mean.dtype is not torch.float32
            or spread.numel() * width != numel or mean.numel() != spread.numel()
            or not (first.is_contiguous() and weight.is_contiguous() and bias.is_contiguous())
            or not (mean.is_contiguous() and spread.is_contiguous())
        ):  # fmt: skip
            return None
        return Operands((first, weight, bias, mean, spread), numel, width, width, is_zero_centered)
    second = first
    if form in ("derivative", "gated_derivative"):
        second = args[1]
        numel, width = second.numel(), second.shape[-1]
    if form == "gated":
        numel, width = numel // 2, width // 2
    if not first.is_contiguous() or not second.is_contiguous():
        return None
    if form == "gated_derivative" and (width % 2 or first.numel() * 2 != numel):
        return None
    if form == "derivative" and first.numel() != numel:
        return None
    run = width // 2 if form == "gated_derivative" else width
    return Operands((first, second, first, first, first), numel, width, run, False)


def _to_host(sums: torch.Tensor) -> _Trial:
    """Start a copy without waiting for it."""
    host = torch.empty(2, NUM_SUMS, dtype=torch.float32, device="cpu", pin_memory=True)
    host.copy_(sums, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return _Trial(host, event)


def _is_same(sums: torch.Tensor) -> bool | None:
    """Whether the two ways agree; None: these numbers do not tell."""
    error, square, their_error, their_square = (float(value) for value in sums.flatten())
    if not 0.0 < their_error < float("inf") or not 0.0 < their_square < float("inf"):
        return None
    return abs(square / their_square - 1.0) < SQUARE_WITHIN and abs(error / their_error - 1.0) < ERROR_WITHIN


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_Tensor = torch.Tensor
"""Looked up once."""
