"""Taps Transformer Engine's casts to FP8 together with their source values; its patches are in on sampled steps only.

Every cast goes through a function of `transformer_engine_torch`, looked up there at each call (TE 2.20
`pytorch/tensor/float8_tensor.py` 116, `module/base.py` 871 and 1786, `layernorm_mlp.py` 102), norms through the copy of
its names in `pytorch/cpp_extensions` (`module/_common.py` 13 and 72), in operations of `te.ops` through the copy that
their own file has imported (`ops/basic/rmsnorm.py` 15, `ops/basic/layer_norm.py` 15):
`quantize`, `bgrad_quantize` and `split_quantize` get the source as an argument. Norms, activations and their
derivatives cast their result inside, and the source never exists in memory. It is computed again, from their inputs in
the counting kernel (`fused_casts`), or by a second call without a quantizer, which returns the source at the cost of
one kernel and of memory for it, and leaves the numbers of training untouched.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, Protocol

import torch

from fp8watch.capture.patches import Make, Patches

logger = logging.getLogger(__name__)

CASTS = ("quantize", "bgrad_quantize")
NORMS = {"layernorm_fwd": 5, "rmsnorm_fwd": 4}
"""Position of the quantizer among the arguments; the buffer for the output is just before it."""
NORMS_IMPORTED_BY = (
    "transformer_engine.pytorch.cpp_extensions", "transformer_engine.pytorch.ops.basic.layer_norm",
    "transformer_engine.pytorch.ops.basic.rmsnorm",
)  # fmt: skip
"""Modules that import these functions by name; the first imports both, the others came with `te.ops`."""
_GATED = ("glu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu")
_PLAIN = ("gelu", "qgelu", "relu", "srelu", "silu")
ACTIVATIONS = {**dict.fromkeys((*_PLAIN, *_GATED), 1), **{f"d{name}": 2 for name in (*_PLAIN, *_GATED)}}
"""Position of the quantizer, the last positional argument."""
WITH_BIAS = {f"dbias_d{name}": 2 for name in _PLAIN}
"""The same; they return the gradient of the bias first."""


class Counter(Protocol):
    """Counts casts for the tap; a row is whatever it counts in."""

    def on_cast(self, source: torch.Tensor, quantizer: Any, made: Any) -> None:
        """Count a cast from its source, its quantizer and its result."""

    def row_of(self, quantizer: Any, made: Any) -> Any | None:
        """Where the cast is counted; None: nowhere, so nobody need find its source."""

    def count_inside(
        self, row: Any, name: str, args: Sequence[Any], options: dict[str, Any], result: Any, made: Any
    ) -> bool:
        """Count a cast that a function has made inside from the function's inputs. False: its source is needed."""

    def count_again(
        self, row: Any, made: Any, function: Callable[..., Any], args: Sequence[Any], options: dict[str, Any],
        is_first: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Count a cast whose source is what this call returns; `is_first`: the first of what it returns."""

    def try_out(
        self, name: str, args: Sequence[Any], options: dict[str, Any], result: Any, source: torch.Tensor, made: Any
    ) -> None:
        """Find out from a cast that was counted again whether such casts can be counted from the inputs."""


class CastTap:
    """`listen` puts the patches in, `leave` takes them out. `extension` replaces TE's own in tests."""

    def __init__(self, extension: Any | None, counter: Counter) -> None:
        """Raises `ImportError` without Transformer Engine."""
        self._extension = extension or importlib.import_module("transformer_engine_torch")
        self._norms = [extension] if extension is not None else list(_norms())
        self._counter = counter
        self._patches = Patches()
        self._places: list[tuple[Any, str, Make]] = []
        self._is_listening = False
        self.num_failures = 0
        """Casts that could not be looked at; the first failure switches this tap off."""

    def listen(self) -> None:
        """Start listening; does nothing after a failure. Raises if a patch cannot be put in, and listens to nothing."""
        if self._is_listening or self.num_failures:
            return
        if not self._patches:
            if not self._places:
                self._places = list(self._find())
            try:
                self._patches.put(self._places)
            except BaseException:
                self._patches.take_out()  # those that are in: half of them would be taken for all
                raise
        self._is_listening = True

    @property
    def is_in_place(self) -> bool:
        """Whether any of its wrappers is."""
        return bool(self._patches)

    def leave(self) -> None:
        """Stop listening."""
        if self._is_listening or self._patches:
            self._is_listening = False
            self._patches.take_out()

    def _find(self) -> Iterator[tuple[Any, str, Make]]:
        wrappers: dict[str, Make] = {name: partial(self._cast_wrapper, name == "bgrad_quantize") for name in CASTS}
        wrappers["split_quantize"] = self._split_wrapper
        wrappers |= {name: partial(self._norm_wrapper, name, at) for name, at in NORMS.items()}
        activations = ACTIVATIONS | WITH_BIAS
        wrappers |= {name: partial(self._activation_wrapper, name, at) for name, at in activations.items()}
        for name, make in wrappers.items():
            for holder in self._norms if name in NORMS else [self._extension]:
                if hasattr(holder, name):
                    yield holder, name, lru_cache(maxsize=2)(make)  # the same wrapper in each sampled step

    def _cast_wrapper(self, has_bias: bool, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function that casts its first argument: most casts of a step, so everything is done in this one frame."""
        on_cast = self._counter.on_cast

        def tapped(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            if self._is_listening:
                try:
                    quantizer = args[1] if len(args) > 1 else options.get("quantizer")
                    if quantizer is not None and isinstance(args[0], _Tensor):
                        made = result[1] if has_bias else result
                        if made is None:  # the result was written into a given tensor
                            made = args[2] if len(args) > 2 else options.get("output")
                        on_cast(args[0], quantizer, made)
                except Exception:
                    self._fail()
            return result

        return tapped

    def _split_wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function that casts parts of its first argument, each with a quantizer of its own."""

        def tapped(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            if self._is_listening:
                try:
                    source, sizes, quantizers = args[:3]
                    for part, quantizer, made in zip(source.split(list(sizes)), quantizers, result, strict=True):
                        if quantizer is not None:
                            self._counter.on_cast(part, quantizer, made)
                except Exception:
                    self._fail()
            return result

        return tapped

    # Of these a step has many, too. What they call again has no quantizer, so that it is no cast to any tap.

    def _norm_wrapper(self, name: str, at: int, original: Callable[..., Any]) -> Callable[..., Any]:
        counter = self._counter
        row_of, count_inside = counter.row_of, counter.count_inside

        def tapped(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            if self._is_listening and len(args) > at and args[at] is not None:
                try:
                    made = result[0]
                    row = row_of(args[at], made)
                    if row is not None and not count_inside(row, name, args, options, result, made):
                        again = list(args)
                        # A new buffer too: TE's own, if one was given, holds the FP8 output.
                        again[at - 1] = again[at] = None
                        source = counter.count_again(row, made, original, again, options, True)
                        counter.try_out(name, args, options, result, source, made)
                except Exception:
                    self._fail()
            return result

        return tapped

    def _activation_wrapper(self, name: str, at: int, original: Callable[..., Any]) -> Callable[..., Any]:
        counter = self._counter
        row_of, count_inside = counter.row_of, counter.count_inside
        has_bias = name in WITH_BIAS

        def tapped(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            if self._is_listening:
                try:
                    quantizer = args[at] if len(args) > at else options.get("quantizer")
                    made = result[1] if has_bias else result
                    row = None if quantizer is None else row_of(quantizer, made)
                    if row is not None and not count_inside(row, name, args, options, result, made):
                        function, again, given = original, list(args), options
                        if has_bias:  # always has a quantizer, but the plain derivative gives the same values
                            function = getattr(self._extension, name.removeprefix("dbias_"))
                            again, given = [args[0], args[1], None], {}
                        elif len(args) > at:
                            again[at] = None
                        else:
                            given = {**options, "quantizer": None}
                        source = counter.count_again(row, made, function, again, given, False)
                        counter.try_out(name, args, options, result, source, made)
                except Exception:
                    self._fail()
            return result

        return tapped

    def _fail(self) -> None:
        self.num_failures += 1
        self._is_listening = False
        logger.warning("fp8watch: the tap on TE's casts failed and is switched off", exc_info=True)


_Tensor = torch.Tensor
"""Looked up once."""


def _norms() -> Iterator[Any]:
    yield importlib.import_module(NORMS_IMPORTED_BY[0])
    for name in NORMS_IMPORTED_BY[1:]:
        with suppress(ImportError):
            yield importlib.import_module(name)
