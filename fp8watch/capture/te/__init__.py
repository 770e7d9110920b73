"""Transformer Engine: reads and writes its scaling state in place, and measures its casts."""
