"""Taps Transformer Engine's casts to FP8 together with their source values; its patches are in on sampled steps only.

Every cast goes through a function of `transformer_engine_torch`, looked up there at each call (TE 2.20
`pytorch/tensor/float8_tensor.py` 116, `module/base.py` 871 and 1786, `layernorm_mlp.py` 102), norms through the copy of
its names in `pytorch/cpp_extensions` (`module/_common.py` 13 and 72), in operations of `te.ops` through the copy that
their own file has imported (`ops/basic/rmsnorm.py` 15, `ops/basic/layer_norm.py` 15):
`quantize`, `bgrad_quantize` and `split_quantize` get the source as an argument. Norms, activations and their
derivatives cast their result inside, and the source never exists in memory. They are called a second time without a
quantizer, which returns the source at the cost of one kernel and leaves the numbers of training untouched.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch

from fp8watch.capture.patches import Patches

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

OnCast = Callable[[torch.Tensor, Any, Any], None]
"""Called with the source, the quantizer and the result of the cast."""


class CastTap:
    """`listen` puts the patches in, `leave` takes them out. `extension` replaces TE's own in tests."""

    def __init__(self, extension: Any | None, on_cast: OnCast, wants: Callable[[Any], bool]) -> None:
        """`wants` decides for a quantizer whether its function is called a second time.

        Raises `ImportError` without Transformer Engine.
        """
        self._extension = extension or importlib.import_module("transformer_engine_torch")
        self._norms = [extension] if extension is not None else list(_norms())
        self._on_cast, self._wants = on_cast, wants
        self._patches = Patches()
        self._is_listening = False
        self._is_inside = False
        self.num_failures = 0
        """Casts that could not be looked at; the first failure switches this tap off."""

    def listen(self) -> None:
        """Start listening; does nothing after a failure."""
        if self._is_listening or self.num_failures:
            return
        self._is_listening = True
        if not self._patches:
            self._patches.put(self._places())

    def leave(self) -> None:
        """Stop listening."""
        if self._is_listening or self._patches:
            self._is_listening = False
            self._patches.take_out()

    def _places(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        looks = {name: self._look_at_cast for name in CASTS}
        looks["split_quantize"] = self._look_at_split
        looks |= dict.fromkeys(NORMS, self._look_at_norm)
        looks |= dict.fromkeys(ACTIVATIONS, self._look_at_activation)
        looks |= dict.fromkeys(WITH_BIAS, self._look_at_activation)
        for name, look in looks.items():
            for holder in self._norms if name in NORMS else [self._extension]:
                if hasattr(holder, name):
                    yield holder, name, self._wrapper(name, look)

    def _wrapper(self, name: str, look: Callable[..., None]) -> Callable[..., Any]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def tapped(*args: Any, **options: Any) -> Any:
                result = original(*args, **options)
                # Calls that we make ourselves are not casts of the model.
                if self._is_listening and not self._is_inside:
                    self._is_inside = True
                    try:
                        if torch.is_grad_enabled():
                            with torch.no_grad():
                                look(name, original, args, options, result)
                        else:  # as inside every autograd function, where casts are made
                            look(name, original, args, options, result)
                    except Exception:
                        self.num_failures += 1
                        self._is_listening = False
                        logger.warning(
                            "fp8watch: the tap on TE's casts failed and is switched off", exc_info=True
                        )  # fmt: skip
                    finally:
                        self._is_inside = False
                return result

            return tapped

        return make

    def _look_at_cast(
        self, name: str, original: Any, args: tuple[Any, ...], options: dict[str, Any], result: Any
    ) -> None:
        source, quantizer = args[0], args[1] if len(args) > 1 else options.get("quantizer")
        made = result[1] if name == "bgrad_quantize" else result
        if made is None:  # the result was written into a given tensor
            made = args[2] if len(args) > 2 else options.get("output")
        if quantizer is not None and isinstance(source, torch.Tensor):
            self._on_cast(source, quantizer, made)

    def _look_at_split(
        self, name: str, original: Any, args: tuple[Any, ...], options: dict[str, Any], result: Any
    ) -> None:
        source, sizes, quantizers = args[:3]
        for part, quantizer, made in zip(source.split(list(sizes)), quantizers, result, strict=True):
            if quantizer is not None:
                self._on_cast(part, quantizer, made)

    def _look_at_norm(
        self, name: str, original: Any, args: tuple[Any, ...], options: dict[str, Any], result: Any
    ) -> None:
        at = NORMS[name]
        if len(args) <= at or args[at] is None or not self._wants(args[at]):
            return
        again = list(args)
        again[at] = None
        again[at - 1] = None  # a new buffer: TE's own holds the FP8 output
        source = original(*again, **options)[0]
        self._on_cast(source, args[at], result[0])

    def _look_at_activation(
        self, name: str, original: Any, args: tuple[Any, ...], options: dict[str, Any], result: Any
    ) -> None:
        at = ACTIVATIONS.get(name) or WITH_BIAS[name]
        quantizer = args[at] if len(args) > at else options.get("quantizer")
        if quantizer is None or not self._wants(quantizer):
            return
        if name in WITH_BIAS:
            # There is no such function without a quantizer, but the plain derivative gives the same values.
            source = getattr(self._extension, name.removeprefix("dbias_"))(args[0], args[1], None)
            self._on_cast(source, quantizer, result[1])
            return
        again = list(args)
        if len(args) > at:
            again[at] = None
        else:
            options = {**options, "quantizer": None}
        self._on_cast(original(*again, **options), quantizer, result)


def _norms() -> Iterator[Any]:
    yield importlib.import_module(NORMS_IMPORTED_BY[0])
    for name in NORMS_IMPORTED_BY[1:]:
        with suppress(ImportError):
            yield importlib.import_module(name)
