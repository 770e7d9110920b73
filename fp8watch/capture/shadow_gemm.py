"""Runs the forward GEMM of one FP8 layer again in BF16, and measures the error of the FP8 output against it.

Plain operations on detached tensors: no autograd, no random numbers, and only new tensors are written to. At most
`MAX_ROWS` rows of the input are used, evenly spread, which bounds time and memory. The rows of a GEMM are independent,
so a relative error over 2,048 of them is as good as one over all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from fp8watch.capture.torchao.scales import is_float8_linear

MAX_ROWS = 2048


class NotProbeable(Exception):
    """Why a layer's GEMM cannot be run again from outside."""


@dataclass(frozen=True, slots=True)
class Shadow:
    """`rows`: positions used of the flattened input; `output`: BF16 [rows, out_features], without bias."""

    rows: slice
    output: torch.Tensor


def why_not(module: torch.nn.Module) -> str | None:
    """Why a module can never be probed; None: it may be."""
    try:
        _kind(module)
        if int(getattr(module, "tp_size", 1) or 1) > 1:
            return "its GEMM is split over several ranks (tensor parallel)"
        for weight in _weights(module):
            _plain(weight)
    except NotProbeable as error:
        return str(error)
    except Exception as error:  # a module whose attributes raise cannot be run again
        return f"{type(error).__name__}: {error}"
    return None


def shadow(module: torch.nn.Module, given: torch.Tensor) -> Shadow:
    """Run the GEMM in BF16. `given`: the module's input [..., in_features]. Raises `NotProbeable`."""
    if hasattr(given, "to_local") or not given.is_floating_point() or not given.numel():
        raise NotProbeable(f"input is a {type(given).__name__} of {given.dtype}, {tuple(given.shape)}")
    with torch.no_grad(), torch.autocast(given.device.type, enabled=False):
        flat = given.detach().reshape(-1, given.shape[-1])
        rows = slice(0, None, -(-flat.shape[0] // MAX_ROWS))
        x = normalised(module, flat[rows]) if _kind(module) == "LayerNormLinear" else flat[rows]
        weight = torch.cat([_plain(part).to(torch.bfloat16) for part in _weights(module)])
        return Shadow(rows, F.linear(x.to(torch.bfloat16), weight))


def relative_error(module: torch.nn.Module, output: Any, made: Shadow) -> torch.Tensor:
    """||y_fp8 - y_bf16|| / ||y_bf16||, both without bias: 0-D float32 on the output's device."""
    result = output[0] if isinstance(output, tuple) else output
    with torch.no_grad(), torch.autocast(result.device.type, enabled=False):
        y = result.detach().reshape(-1, result.shape[-1])[made.rows].float()
        if _adds_bias(module):
            y = y - torch.cat([bias.detach().float() for bias in _biases(module)])
        reference = made.output.float()
        error: torch.Tensor = torch.linalg.vector_norm(y - reference) / torch.linalg.vector_norm(reference)
        return error


def _kind(module: torch.nn.Module) -> str:
    name = type(module).__name__
    if (theirs := transformer_engine_class(module)) is not None:
        if theirs in ("Linear", "LayerNormLinear"):
            return theirs
        raise NotProbeable(f"the GEMMs inside {name} cannot be reached from outside")
    if is_float8_linear(module) or name == "Fp8Linear" or isinstance(module, torch.nn.Linear):
        return "Linear"
    if isinstance(getattr(module, "fp8_meta", None), dict) and name == "Linear":
        return "Linear"  # a stand-in of Transformer Engine's
    raise NotProbeable(f"{name} is not a layer with one GEMM")


def transformer_engine_class(module: torch.nn.Module) -> str | None:
    """Name of the Transformer Engine class that a module is an instance of, directly or derived; None: of none."""
    bases = (base for base in type(module).__mro__ if base.__module__.startswith("transformer_engine"))
    return next((base.__name__ for base in bases), None)


def _weights(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for name in getattr(module, "weight_names", None) or ["weight"]:
        yield getattr(module, name)


def _biases(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for name in getattr(module, "bias_names", None) or ["bias"]:
        bias = getattr(module, name, None)
        if isinstance(bias, torch.Tensor) and bias.numel():
            yield bias


def _adds_bias(module: torch.nn.Module) -> bool:
    """Whether the output includes the bias: Transformer Engine can return it instead of adding it."""
    is_added = bool(getattr(module, "apply_bias", True)) and not getattr(module, "return_bias", False)
    return is_added and any(True for _ in _biases(module))


def _plain(weight: torch.Tensor) -> torch.Tensor:
    if type(weight) in (torch.Tensor, torch.nn.Parameter):
        return weight.detach()
    if hasattr(weight, "to_local"):
        raise NotProbeable("its weight is sharded (DTensor)")
    if hasattr(weight, "_quantizer"):  # FP8 primary weights: both use the same, so only the input's error shows
        values: torch.Tensor = weight.detach().dequantize()
        return values
    raise NotProbeable(f"its weight is a {type(weight).__name__}")


def normalised(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The input of the GEMM in TE's LayerNormLinear, computed from the module's own parameters in float32."""
    gamma = module.layer_norm_weight.detach().float()
    if module.zero_centered_gamma:
        gamma = gamma + 1.0
    shape = (x.shape[-1],)
    if module.normalization == "RMSNorm":
        return F.rms_norm(x.float(), shape, gamma, module.eps)
    return F.layer_norm(x.float(), shape, gamma, module.layer_norm_bias.detach().float(), module.eps)
