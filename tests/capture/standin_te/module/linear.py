from __future__ import annotations

import torch

from standin_te.gemm import general_gemm
from standin_te.module.base import TransformerEngineBaseModule
from standin_te.tensors import quantize


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inp, weight, module):
        x, w = inp, weight
        if module.fp8:
            x, w = quantize(inp, block=module.block), quantize(weight, block=module.block)
        ctx.saved, ctx.module, ctx.fp8 = (x, w), module, module.fp8
        return general_gemm(w, x)[0]

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved
        dy = quantize(grad, "kFloat8E5M2", ctx.module.block) if ctx.fp8 else grad
        dx = None
        if ctx.needs_input_grad[0]:
            dx, *_ = general_gemm(w, dy, layout="NN", grad=True)
        dw, *_ = general_gemm(x, dy, layout="NT", grad=True)
        return dx, dw, None


class Linear(TransformerEngineBaseModule):
    def __init__(self, n: int, m: int, block: int | None = None) -> None:
        super().__init__(block)
        self.weight = torch.nn.Parameter(torch.randn(m, n) / n**0.5)

    def forward(self, inp):
        output = _Linear.apply(self.prepare_forward(inp), self.weight, self)
        self.end_forward()
        return output
