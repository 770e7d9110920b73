"""Sends frames to the agent and receives commands, on its own thread: the training thread never waits for it."""

from __future__ import annotations

from fp8watch.transport.channel import Channel

__all__ = ["Channel"]
