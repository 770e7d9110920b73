"""The actions that change a live run: one file per action, each with apply, read back and revert."""
