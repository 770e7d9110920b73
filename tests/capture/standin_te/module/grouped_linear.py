from __future__ import annotations

import torch

from standin_te.gemm import general_grouped_gemm
from standin_te.module.base import TransformerEngineBaseModule
from standin_te.tensors import quantize


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inp, splits, module, *weights):
        x = [quantize(part, block=module.block) for part in inp.split(splits)]
        w = [quantize(weight, block=module.block) for weight in weights]
        ctx.saved, ctx.module, ctx.splits = (x, w), module, splits
        return torch.cat(general_grouped_gemm(w, x))

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved
        dy = [quantize(part, "kFloat8E5M2", ctx.module.block) for part in grad.split(ctx.splits)]
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.cat(general_grouped_gemm(w, dy, layout="NN", grad=True))
        dw = general_grouped_gemm(x, dy, layout="NT", grad=True)
        return dx, None, None, *dw


class GroupedLinear(TransformerEngineBaseModule):
    def __init__(self, num: int, n: int, m: int, block: int | None = None) -> None:
        super().__init__(block)
        self.num_gemms = num
        for i in range(num):
            self.register_parameter(f"weight{i}", torch.nn.Parameter(torch.randn(m, n) / n**0.5))

    def forward(self, inp, splits):
        weights = [self.get_parameter(f"weight{i}") for i in range(self.num_gemms)]
        output = _Grouped.apply(self.prepare_forward(inp, self.num_gemms), splits, self, *weights)
        self.end_forward()
        return output
