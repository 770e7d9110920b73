from __future__ import annotations

import torch

from standin_te.tensors import dequantize


def general_gemm(A, B, *, layout: str = "TN", grad: bool = False) -> tuple[torch.Tensor, None, None, None]:
    a, b = dequantize(A), dequantize(B)
    out = {"TN": lambda: b @ a.t(), "NN": lambda: b @ a, "NT": lambda: b.t() @ a}[layout]()
    return out, None, None, None


def general_grouped_gemm(A, B, *, layout: str = "TN", grad: bool = False) -> list[torch.Tensor]:
    return [general_gemm(a, b, layout=layout, grad=grad)[0] for a, b in zip(A, B, strict=True)]
