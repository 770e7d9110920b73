"""What defines one training of the demo: everything that its losses depend on, and nothing else.

Hyper-parameters are those of small GPTs (AdamW, weight decay 0.1, clip 1.0, cosine to a tenth). A scenario may need
others; its healthy twin then has the same.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Device = Literal["cpu", "cuda"]
EngineName = Literal["emulation", "transformer_engine"]


class TrainingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Plain numbers; passed to the worker process as JSON."""

    steps: int = 400
    seed: int = 0
    batch_size: int = 16
    """Samples per optimizer step."""
    length: int = 64
    """Tokens per sample."""
    num_layers: int = 4
    width: int = 128
    peak_lr: float = 3e-3
    warmup_steps: int = 40
    lr_floor: float = 0.1
    """Final LR over `peak_lr`."""
    max_norm: float = 1.0
    """Limit of the gradient norm."""
    weight_decay: float = 0.1
    beta2: float = 0.95
    """AdamW's beta2."""
    amax_history_len: int = 1024
    device: Device = "cpu"
    engine: EngineName = "emulation"
    """What computes in FP8 (`fp8watch.demo.engines`)."""


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One process: a training with or without a fault, watched or not."""

    config: TrainingConfig
    scenario: str = "healthy"
    """The scenario whose fault is injected; `healthy` injects none."""
    fault_step: int | None = None
    layer: str | None = None
    run: str | None = None
    """Run name when it is watched; None: the process never imports fp8watch's monitoring."""
    policy: str | None = None
    checkpoints: str | None = None
    """Directory of its checkpoints."""
