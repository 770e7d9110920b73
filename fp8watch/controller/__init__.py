"""Merge, decide, command, verify: what runs beside the training process and keeps the store."""
