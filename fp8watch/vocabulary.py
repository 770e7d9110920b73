"""The words that records, policies, metrics and dashboards share: severities, causes, actions, detectors."""

from __future__ import annotations

from typing import Literal

Severity = Literal["warn", "act"]
Cause = Literal["precision", "optimisation", "data", "hardware", "bookkeeping", "unknown"]
Mode = Literal["observe", "approve", "auto"]
Verb = Literal["apply", "revert"]
Outcome = Literal["helped", "no_effect", "reverted", "pending"]
CheckpointLabel = Literal["pending", "candidate", "good", "tainted"]

ACTIONS = (
    "lengthen_warmup", "rewarm", "hold_lr", "tighten_clip", "skip_update", "adjust_loss_scale", "raise_margin",
    "repair_scale", "bf16_layers", "bf16_all", "checkpoint_now", "checkpoint_cadence", "recheck", "rollback", "halt",
)  # fmt: skip
MAX_SKIP_BATCHES = 10_000
"""Most batches that a rollback may leave out in all. PaLM left out 200 to 500 (arXiv 2204.02311, 5.1). A loader without
indices has to read what is left out, on every rank, before the next step."""
DETECTORS = (
    "nonfinite", "scale_frozen", "saturation", "underflow", "amax_jump", "amax_drift", "crest", "loss_spike",
    "grad_spike", "divergence", "stuck", "update_rms", "attention_logit", "kurtosis", "zero_grad", "rank_mismatch",
    "shadow_error", "clip_rate", "no_progress", "blind", "underflow_drift", "grad_drift", "reference_gap",
)  # fmt: skip
