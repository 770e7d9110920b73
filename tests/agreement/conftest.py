"""Ports come from what finds them for the stores' tests, threads that act as ranks from those of checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path

for area in ("store", "checkpoints"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / area))
