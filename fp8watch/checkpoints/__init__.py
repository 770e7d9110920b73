"""Checkpoints that a rollback can trust: complete, verified, labelled, with the position in the data.

Importing this package loads no torch: `targets` and `config` are shared with processes that have none.
"""

from __future__ import annotations

from fp8watch.checkpoints.config import Checkpoints

__all__ = ["Checkpoints"]
