"""What can be changed in a live run: one file per action, each with apply, read back and revert."""
