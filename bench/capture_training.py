"""The trainings that `capture.py` times: stacks of Transformer Engine's layers, and of torchao's compiled ones."""

from __future__ import annotations

from typing import Any, Protocol

import torch

SHAPES = {
    "gpu-bound": {"layers": 12, "width": 4096, "batch": 8, "length": 2048, "heads": 32},
    "launch-bound": {"layers": 16, "width": 2048, "batch": 8, "length": 1024, "heads": 16},
    "many-tensors": {"layers": 84, "width": 256, "batch": 1, "length": 64, "heads": 4},
}


class Training(Protocol):
    """A model, its optimizer, and one step of a loop."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, watch: Any | None) -> None:
        """One optimizer step, as in the README."""


def update(training: Training, loss: torch.Tensor, watch: Any | None) -> None:
    """From the loss to the boundary."""
    loss.backward()
    parameters = list(training.model.parameters())  # so that neither arm pays for going through the model
    clip = torch.nn.utils.clip_grad_norm_ if watch is None else watch.clip_grad_norm_
    clip(parameters, 1.0)
    training.optimizer.step()
    training.optimizer.zero_grad()
    if watch is not None:
        watch.step(loss)


class TransformerEngine:
    """A stack of TE transformer layers in delayed scaling with AdamW."""

    def __init__(self, layers: int, width: int, batch: int, length: int, heads: int) -> None:
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import DelayedScaling, Format

        torch.manual_seed(0)
        self._te = te
        self.model: torch.nn.Module = torch.nn.ModuleList(
            te.TransformerLayer(
                width, 4 * width, heads, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16,
                attn_input_format="bshd", self_attn_mask_type="causal",
            )
            for _ in range(layers)
        ).cuda()  # fmt: skip
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self._recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=1024, amax_compute_algo="max")
        self._x = torch.randn(batch, length, width, device="cuda", dtype=torch.bfloat16)

    def step(self, watch: Any | None) -> None:
        """One optimizer step."""
        with self._te.autocast(enabled=True, recipe=self._recipe):
            hidden = self._x
            for layer in self.model.children():
                hidden = layer(hidden)
        update(self, hidden.float().pow(2).mean(), watch)


class Torchao:
    """MLP blocks in rowwise FP8, compiled block by block as trainers do, so that one graph serves all of them."""

    def __init__(self, layers: int, width: int, batch: int, length: int) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        torch.manual_seed(0)
        model = torch.nn.Sequential(*[_Block(width) for _ in range(layers)]).cuda().bfloat16()
        self.model = convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("rowwise"))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self._x = torch.randn(batch * length, width, device="cuda", dtype=torch.bfloat16)
        for block in self.model.children():
            block.compile()

    def step(self, watch: Any | None) -> None:
        """One optimizer step."""
        update(self, self.model(self._x).float().pow(2).mean(), watch)


class _Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.norm = torch.nn.RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
