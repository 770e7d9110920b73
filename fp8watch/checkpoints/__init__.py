"""Checkpoints for rollbacks: complete, verified, labelled, with the position in the data.

Importing this package does not import torch, because processes without torch use `targets` and `config`.
"""

from __future__ import annotations

from fp8watch.checkpoints.config import Checkpoints

__all__ = ["Checkpoints"]
