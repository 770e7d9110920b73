from __future__ import annotations

from standin_te.gemm import general_gemm

__all__ = ["general_gemm"]
