"""Frames out, commands in, on a thread of its own: the training thread never waits for it."""
