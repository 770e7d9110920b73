"""What can be changed in a live run: one file an action, each with apply, read back and revert."""
