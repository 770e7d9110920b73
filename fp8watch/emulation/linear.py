"""`nn.Linear` with its three GEMMs on FP8 values: y = x8 w8^T, dx = g8 w8, dw = g8^T x8, accumulated in FP32.

In high precision the same GEMMs run on BF16 operands, accumulated in FP32 as on a tensor core. The amax of every
operand is still measured and the scales follow it, so a return to FP8 starts from fresh scales.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fp8watch.emulation import checks
from fp8watch.emulation.cast import measure_amax, quantize
from fp8watch.emulation.first_order import first_order
from fp8watch.emulation.recipe import DelayedScaling
from fp8watch.emulation.region import Region, autocast, is_in_backward, open_region, recomputed_region
from fp8watch.emulation.scaling import ScalingState
from fp8watch.emulation.statistics import CastStatistics, quantize_and_count
from fp8watch.emulation.taps import GRAD_OUTPUT, INPUT, WEIGHT, all_taps, all_value_taps
from fp8watch.emulation.update import AmaxGroup
from fp8watch.formats import Fp8Format


class Fp8Linear(nn.Linear):
    """Drop-in for `nn.Linear` with the same parameters and `state_dict` (`EmulatedControls` saves the FP8 state).

    Input of any float dtype [..., in_features]; the output has the same dtype, or autocast's.
    """

    recipe: DelayedScaling
    amax_group: AmaxGroup
    scaling_forward: ScalingState
    """Tensors input, weight."""
    scaling_backward: ScalingState
    """Tensor grad_output."""
    is_high_precision: bool
    """Precision to use from the next region on; see `ran_high_precision` for the one that was used."""
    ran_high_precision: bool | None
    """Whether the last forward ran in high precision; None: none since the last switch."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: DelayedScaling | None = None,
        amax_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        if reason := checks.layer("Fp8Linear", self):
            raise ValueError(reason)
        self.start_fp8(DelayedScaling() if recipe is None else recipe, AmaxGroup(amax_group))

    def start_fp8(self, recipe: DelayedScaling, amax_group: AmaxGroup) -> None:
        """Set fresh FP8 state (scales 1, histories 0), for a new layer or an `nn.Linear` whose class was changed."""
        checks.of_kind("recipe", recipe, DelayedScaling, "fp8watch.emulation.DelayedScaling(...)")
        device = self.weight.device if self.weight.device.type != "meta" else torch.device("cpu")
        length = recipe.amax_history_len
        self.recipe = recipe
        self.amax_group = amax_group
        self.scaling_forward = ScalingState(("input", "weight"), recipe.forward_format, length, device)
        self.scaling_backward = ScalingState(("grad_output",), recipe.backward_format, length, device)
        self.is_high_precision = False
        self.ran_high_precision = None

    def set_high_precision(self, high_precision: bool) -> None:
        """Run in BF16 from the next region on, or again in FP8 with scales made from the amax measured meanwhile."""
        checks.of_kind("high_precision", high_precision, bool, "True or False")
        if high_precision == self.is_high_precision:
            return
        self.is_high_precision = high_precision
        self.ran_high_precision = None
        if not high_precision:
            self.scaling_forward.purge(self.recipe)
            self.scaling_backward.purge(self.recipe)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        is_recompute = is_in_backward()
        region = recomputed_region(self) if is_recompute else open_region()
        if region is None and not is_recompute:
            with autocast(self):
                return self.forward(input)
        if region is None:
            region = Region(None)
        if not is_recompute:
            self.ran_high_precision = region.call(self).is_high_precision
        out_dtype = input.dtype
        if torch.is_autocast_enabled(input.device.type):
            out_dtype = torch.get_autocast_dtype(input.device.type)
        with _without_autocast(input.device.type):
            output: torch.Tensor = _Fp8Matmul.apply(  # type: ignore[no-untyped-call]
                input, self.weight, self.bias, self, region, is_recompute, out_dtype
            )
        # Reshaped here, because a view returned by a custom function must not be changed by an in-place activation.
        return output if input.dim() == 2 else output.view(*input.shape[:-1], output.shape[-1])

    def _apply(self, fn: Any, recurse: bool = True) -> Fp8Linear:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.weight.device.type != "meta":
            self.scaling_forward.to(self.weight.device)
            self.scaling_backward.to(self.weight.device)
        return self

    def extra_repr(self) -> str:
        """`nn.Linear`'s, and the format."""
        return f"{super().extra_repr()}, fp8={self.recipe.fp8_format}"


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager[None]:
    """Context in which the GEMMs run in FP32 even under autocast."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def _cast(
    module: Fp8Linear,
    tensor: int,
    values: torch.Tensor,
    scale: torch.Tensor,
    fmt: Fp8Format,
    *,
    amax: torch.Tensor | None,
    is_high_precision: bool,
) -> torch.Tensor:
    """The operand as float32 FP8 values, or rounded to BF16. Without `amax` (recomputation) no tap is called."""
    taps = all_taps() if amax is not None else ()
    if amax is not None and not is_high_precision:
        for listener in all_value_taps():
            listener.on_values(module, tensor, values=values, scale=scale, fmt=fmt, amax=amax)
    statistics: CastStatistics | None = None
    if is_high_precision:
        operand = values.bfloat16().float()
    elif amax is not None and any(tap.wants_statistics(module) for tap in taps):
        operand, statistics = quantize_and_count(values, scale, fmt, amax)
    else:
        operand = quantize(values, scale, fmt)
    for tap in taps:
        tap.on_cast(module, tensor, high_precision=is_high_precision, statistics=statistics)
    return operand


class _Fp8Matmul(torch.autograd.Function):
    """The GEMMs. Operands are kept without their inverse scales, which are multiplied into the smallest factor."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        module: Fp8Linear,
        region: Region,
        is_recompute: bool,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        call = region.call(module)
        state = module.scaling_forward
        input_scale, weight_scale = call.scale.unbind()
        x = input.reshape(-1, input.shape[-1])
        input_amax = weight_amax = None
        if not is_recompute:
            input_amax, weight_amax = measure_amax(x), measure_amax(weight)
            state.record(torch.stack((input_amax, weight_amax)))
            if not region.is_training:  # evaluation: recorded as in Transformer Engine, but not reported to taps
                input_amax = weight_amax = None
        x8 = _cast(module, INPUT, x, input_scale, state.fmt, amax=input_amax, is_high_precision=call.is_high_precision)
        w8 = _cast(
            module, WEIGHT, weight, weight_scale, state.fmt, amax=weight_amax, is_high_precision=call.is_high_precision
        )
        ctx.save_for_backward(x8, w8, call.scale)
        ctx.module, ctx.region, ctx.is_high_precision = module, region, call.is_high_precision
        ctx.input_dtype, ctx.weight_dtype = input.dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.input_shape = input.shape
        factor = w8 if call.is_high_precision else w8 * (weight_scale.reciprocal() * input_scale.reciprocal())
        y = torch.mm(x8, factor.t()) if bias is None else torch.addmm(bias.float(), x8, factor.t())
        return y.to(out_dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        module: Fp8Linear = ctx.module
        ctx.region.begin_backward()
        with _without_autocast(grad_output.device.type):
            x8, w8, forward_scale = ctx.saved_tensors
            input_scale, weight_scale = forward_scale.unbind()
            state = module.scaling_backward
            gradient = grad_output.reshape(-1, grad_output.shape[-1])
            amax = measure_amax(gradient)
            state.record(amax.unsqueeze(0))
            scale = state.scale[0].clone()
            g8 = _cast(
                module, GRAD_OUTPUT, gradient, scale, state.fmt, amax=amax, is_high_precision=ctx.is_high_precision
            )
            grad_input = grad_weight = grad_bias = None
            if ctx.needs_input_grad[0]:
                factor = w8 if ctx.is_high_precision else w8 * (weight_scale.reciprocal() * scale.reciprocal())
                grad_input = torch.mm(g8, factor).to(ctx.input_dtype).view(ctx.input_shape)
            if ctx.needs_input_grad[1]:
                grad_weight = torch.mm(g8.t(), x8)
                if not ctx.is_high_precision:
                    grad_weight.mul_(scale.reciprocal() * input_scale.reciprocal())
                grad_weight = grad_weight.to(ctx.weight_dtype)
            if ctx.needs_input_grad[2]:
                grad_bias = gradient.float().sum(0).to(ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None
