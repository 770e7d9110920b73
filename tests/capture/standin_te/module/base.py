from __future__ import annotations

from types import SimpleNamespace

import torch


class TransformerEngineBaseModule(torch.nn.Module):
    def __init__(self, block: int | None = None) -> None:
        super().__init__()
        self.fp8_meta: dict[str, object] = {}
        self.fp8 = False
        self.enabled = True
        self.block = block

    def prepare_forward(self, inp: torch.Tensor, num_gemms: int = 1) -> torch.Tensor:
        self.fp8 = self.enabled
        if self.fp8:
            self.fp8_meta = {"recipe": SimpleNamespace(), "scaling_fwd": object(), "scaling_bwd": object()}
        return inp

    def end_forward(self) -> None:
        """Of no consequence here."""
