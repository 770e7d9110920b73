"""Reads numerics in the training process: one source per framework, one asynchronous copy per step."""
