"""A small SwiGLU GPT: the architecture of today's language models, small enough to train on two CPU cores.

Pre-norm blocks, rotary positions, SwiGLU. Every matrix product in a block is an `nn.Linear`, which
`fp8watch.emulation.convert` (or Transformer Engine) converts to FP8; embedding, norms and head stay in high precision,
as in FP8 recipes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from fp8watch.demo.data import NUM_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Size of the model; every width is a multiple of 16, as FP8 GEMMs require."""

    num_layers: int = 4
    width: int = 128
    num_heads: int = 4
    hidden: int = 352
    """Width of the SwiGLU, about 8/3 of `width`."""
    length: int = 128
    """Tokens per sample."""


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    rotary: torch.Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.proj = nn.Linear(shape.width, shape.width, bias=False)
        head = shape.width // shape.num_heads
        frequency = 10000.0 ** (-torch.arange(0, head, 2) / head)
        angle = torch.arange(shape.length)[:, None] * frequency
        self.register_buffer("rotary", torch.stack((angle.cos(), angle.sin())), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, width) -> (B, T, width)."""
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(self._rotate(q), self._rotate(k), v, is_causal=True)
        y: torch.Tensor = self.proj(out.transpose(1, 2).reshape(batch, length, width))
        return y

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.rotary[:, : x.shape[-2]]
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class SwiGLU(nn.Module):
    """down(silu(gate) * up): FP8 runs grow their outliers in this product."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_up = nn.Linear(shape.width, 2 * shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, width) -> (B, T, width)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        y: torch.Tensor = self.down(F.silu(gate) * up)
        return y


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width)
        self.mlp = SwiGLU(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, width) -> (B, T, width)."""
        x = x + self.attention(self.attention_norm(x))
        y: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_BYTES, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, NUM_BYTES, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # GPT-2's initialisation: projections into the residual stream shrink with depth.
                is_residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / ((2 * shape.num_layers) ** 0.5 if is_residual else 1.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(B, T) int64 -> logits (B, T, 256)."""
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def layer_names(shape: Shape) -> list[str]:
    """Names of the modules that run in FP8, in the model's order."""
    parts = ("attention.qkv", "attention.proj", "mlp.gate_up", "mlp.down")
    return [f"blocks.{index}.{part}" for index in range(shape.num_layers) for part in parts]
