"""Norms and activations whose casts must be counted from their inputs as from their results; in Triton's interpreter.

TRITON_INTERPRET=1 python tests/gpu/fused_cases.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from interpreted import report
from torch import Tensor

from fp8watch.capture.statistics import Item
from fp8watch.capture.statistics.count import count_by_torch
from fp8watch.capture.te.cast_rows import CastRows
from fp8watch.capture.te.fused_casts import FUNCTIONS, FusedCasts
from fp8watch.capture.te.tensors import scale_of
from fp8watch.emulation.cast import to_float8
from fp8watch.formats import E4M3, E5M2, Fp8Format

PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}
CODES = {E4M3: "kFloat8E4M3", E5M2: "kFloat8E5M2"}
SHAPES = ((1, 16), (3, 48), (70, 32), (5, 1040))
EPS = 1e-5


class Call:
    """Arguments and result of a function, and the source of the cast that it makes inside (float32)."""

    def __init__(self, name: str, shape: tuple[int, int], dtype: torch.dtype, device: str, *, zero_centered: bool):
        generator = torch.Generator().manual_seed(7)

        def made(*size: int) -> Tensor:
            return (torch.randn(size, generator=generator) * 2.0).to(dtype).to(device)

        form, activation = FUNCTIONS[name]
        rows, width = shape
        self.result: Any = None
        if form in ("layernorm", "rmsnorm"):
            x, weight, bias = made(rows, width), made(width), made(width)
            gamma = weight.float() + zero_centered
            if form == "layernorm":
                mean = x.float().mean(1)
                spread = torch.rsqrt(x.float().var(1, correction=0) + EPS)
                self.source = F.layer_norm(x.float(), (width,), gamma, bias.float(), EPS)
                self.args: tuple[Any, ...] = (x, weight, bias, EPS, None, "q", None, 0, zero_centered)
                self.result = (None, mean, spread)
            else:
                spread = torch.rsqrt(x.float().square().mean(1) + EPS)
                self.source = F.rms_norm(x.float(), (width,), gamma, EPS)
                self.args = (x, weight, EPS, None, "q", None, 0, zero_centered)
                self.result = (None, None, spread)
            return
        function = PLAIN[activation]
        is_gated = form.startswith("gated")
        x = made(rows, 2 * width if is_gated else width)
        value = x.float().requires_grad_()
        out = function(value[:, :width]) * value[:, width:] if is_gated else function(value)
        if form.endswith("derivative"):
            grad = made(rows, width)
            (self.source,) = torch.autograd.grad(out, value, grad.float())
            self.args = (grad, x, "q")
        else:
            self.source = out.detach()
            self.args = (x, "q")


def calls(device: str) -> Iterator[tuple[str, str, Call, Fp8Format, float | None]]:
    """What it is, the function, its call, the format, and the scale of the cast (None: one that clips a little)."""
    for name in FUNCTIONS:
        for number, shape in enumerate(SHAPES):
            for dtype in (torch.bfloat16, torch.float32) if number else (torch.bfloat16,):
                fmt = (E4M3, E5M2)[number % 2]
                call = Call(name, shape, dtype, device, zero_centered=bool(number % 2))
                yield f"{name} {shape} {dtype} {fmt.name}", name, call, fmt, None
    for name in ("layernorm_fwd", "relu", "drelu", "reglu", "dreglu"):  # whose zeros are exact
        for scale in (float("nan"), float("inf"), 0.0, torch.finfo(torch.float32).max):
            call = Call(name, SHAPES[1], torch.bfloat16, device, zero_centered=False)
            yield f"{name} times {scale}", name, call, E4M3, scale


def cast(source: Tensor, fmt: Fp8Format, given: float | None) -> Any:
    """Without a scale: with a few elements that are clipped, and many that become zero."""
    scale = (0.9 * fmt.max / source.abs().amax()).reshape(1).mul_(1.2)
    if given is not None:
        scale.fill_(given)
    codes = to_float8(source, scale[0], fmt).view(torch.uint8)
    return SimpleNamespace(_data=codes, _scale_inv=scale.reciprocal(), _fp8_dtype=CODES[fmt])


def differences(fused: FusedCasts, programs: int, device: str) -> Iterator[str]:
    """What is not counted as torch counts it.

    An element at a limit may fall to either side by its last bit: clipped or not, and zero or not where a tanh is all
    but -1.
    """
    for says, name, call, fmt, scale in calls(device):
        made = cast(call.source, fmt, scale)
        fused._formats[made._fp8_dtype] = fmt
        row = CastRows(torch.device(device), programs).row(("module", "input"))
        for _ in range(2):
            if not fused.count(row, name, call.args, {}, call.result, made):
                yield f"{says} was not taken"
        if row.elements != 2 * call.source.numel():
            yield f"{says}: {row.elements} elements"
        item = Item(values=call.source, scale=scale_of(made._scale_inv).reshape(()), fmt=fmt, codes=made._data)
        wanted = count_by_torch(item)
        saturated, before, after, nonfinite = (count // 2 for count in row.counts.sum(0).tolist())
        zeros = call.source.numel() - before
        underflowed = before - after
        found = {"underflowed": underflowed, "nonfinite": nonfinite, "zeros": zeros}
        for what, number in found.items():
            if abs(number - int(getattr(wanted, what))) > (0 if what == "nonfinite" else 2 + zeros // 4):
                yield f"{says} {what}: {number}, {getattr(wanted, what)}"
        if abs(saturated - int(wanted.saturated)) > 2:
            yield f"{says} saturated: {saturated}, {wanted.saturated}"
        sums = torch.stack([wanted.squared_error, wanted.squared_values])
        if not torch.allclose(row.sums.sum(0) / 2, sums, rtol=2e-3, equal_nan=True):
            yield f"{says}: {row.sums.sum(0) / 2}, {sums}"


def main() -> int:
    from fp8watch.capture.te import cast_kernel, fused_cast_kernel

    cast_kernel.PROGRAMS = fused_cast_kernel.PROGRAMS = 3
    fused_cast_kernel.THREADS = 16
    return report(differences(FusedCasts(fused_cast_kernel, cast_kernel), 3, "cpu"))


if __name__ == "__main__":
    sys.exit(main())
