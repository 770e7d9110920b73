"""Frames out, commands in, on a thread of its own: the training thread never waits for it."""

from __future__ import annotations

from fp8watch.transport.channel import Channel

__all__ = ["Channel"]
