"""Transformer Engine: its scaling state read and written where it lies, and its casts looked at."""
