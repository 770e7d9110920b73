"""FP8 on machines without it: Transformer Engine's delayed scaling, computed in FP32 on any device.

For rehearsing a recipe before renting GPUs, for tests and for the demo. It is slow: every GEMM runs in FP32 and every
cast takes about six passes over the tensor. Values and scales are those of the hardware formats; the order of
summation inside a GEMM is not. See `docs/emulation.md` for the differences.
"""

from __future__ import annotations

from fp8watch.emulation.convert import convert, fp8_modules
from fp8watch.emulation.linear import Fp8Linear
from fp8watch.emulation.recipe import DelayedScaling
from fp8watch.emulation.region import autocast
from fp8watch.emulation.scaling import ScalingState

__all__ = ["DelayedScaling", "Fp8Linear", "ScalingState", "autocast", "convert", "fp8_modules"]
