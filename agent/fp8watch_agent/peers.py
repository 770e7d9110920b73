"""Identifies the peer of a Unix socket through the kernel (SO_PEERCRED), so that it cannot be forged.

By default only the agent's own user and root may connect, and the socket's mode enforces the same. With `any_user` all
users may connect, and a run belongs to the user who started it. Only that user and root can then send messages for the
run or receive its commands.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

_CREDENTIALS = struct.Struct("3i")
OWNER_ONLY = 0o600
"""Mode of the socket file."""
EVERYBODY = 0o666
"""Mode of the socket file with `any_user`."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Process, user and group of the peer when it connected."""

    pid: int
    uid: int
    gid: int


def peer_of(connection: socket.socket) -> Peer:
    """The peer of a connection. Raises `OSError` for anything but a Unix socket."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Peer(*_CREDENTIALS.unpack(data))


class Owners:
    """The user that each run belongs to."""

    def __init__(self, *, any_user: bool, own_uid: int | None = None) -> None:
        self._any_user = any_user
        self._own_uid = os.getuid() if own_uid is None else own_uid
        self._owners: dict[str, int] = {}

    def may_connect(self, peer: Peer) -> bool:
        """Whether this user is served at all."""
        return self._any_user or peer.uid in (0, self._own_uid)

    def claim(self, run: str, peer: Peer) -> bool:
        """Whether this user may send for the run. The first one to claim it owns it."""
        owner = self._owners.setdefault(run, peer.uid)
        return peer.uid in (0, owner)

    def owner(self, run: str) -> int | None:
        """User ID of a run's owner; None: not claimed."""
        return self._owners.get(run)

    def release(self, run: str) -> None:
        """The run is over, and its name is free."""
        self._owners.pop(run, None)
