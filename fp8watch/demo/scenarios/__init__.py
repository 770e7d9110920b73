"""Faults as real runs have them, one file a family.

They act on the model, the schedule and the data only, through what Python and torch offer; they share no code,
flag or metadata with what has to find them.
"""

from __future__ import annotations
