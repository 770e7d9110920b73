from __future__ import annotations

import torch

from standin_te.gemm import general_gemm
from standin_te.module.base import TransformerEngineBaseModule
from standin_te.tensors import quantize


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inp, first, second, module):
        x, w1, w2 = (quantize(t, block=module.block) for t in (inp, first, second))
        hidden, *_ = general_gemm(w1, x)
        h = quantize(hidden.relu(), block=module.block)
        ctx.saved, ctx.module, ctx.mask = (x, w1, h, w2), module, hidden > 0
        return general_gemm(w2, h)[0]

    @staticmethod
    def backward(ctx, grad):
        x, w1, h, w2 = ctx.saved
        dy = quantize(grad, "kFloat8E5M2", ctx.module.block)
        dh, *_ = general_gemm(w2, dy, layout="NN", grad=True)
        dw2, *_ = general_gemm(h, dy, layout="NT", grad=True)
        dz = quantize(dh * ctx.mask, "kFloat8E5M2", ctx.module.block)
        dx, *_ = general_gemm(w1, dz, layout="NN", grad=True)
        dw1, *_ = general_gemm(x, dz, layout="NT", grad=True)
        return dx, dw1, dw2, None


class LayerNormMLP(TransformerEngineBaseModule):
    def __init__(self, n: int, m: int, block: int | None = None) -> None:
        super().__init__(block)
        self.fc1_weight = torch.nn.Parameter(torch.randn(m, n) / n**0.5)
        self.fc2_weight = torch.nn.Parameter(torch.randn(n, m) / m**0.5)

    def forward(self, inp):
        output = _Mlp.apply(self.prepare_forward(inp, num_gemms=2), self.fc1_weight, self.fc2_weight, self)
        self.end_forward()
        return output
