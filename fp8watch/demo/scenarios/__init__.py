"""Faults as they occur in real runs, one file per family.

They act on the model, the schedule and the data only, through what Python and torch offer. They share no code, flag or
metadata with what has to find them.
"""

from __future__ import annotations
