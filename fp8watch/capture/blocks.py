"""Which transformer block a module belongs to: the `block` label of metrics and heat maps."""

from __future__ import annotations


def block_of(module: str) -> str:
    """First whole number in the qualified name (`layers.3.mlp.fc1` -> `3`), else the top-level name (`head`)."""
    parts = module.split(".")
    return next((part for part in parts if part.isdigit()), parts[0])
