"""Who is at the other end of the unix socket: the kernel says so (SO_PEERCRED), the peer cannot.

By default only this process's own user and root may connect; the socket's mode says the same. A node's agent that
serves several users (`any_user`) lets all of them in, and then a run belongs to the user who began it: nobody else
can send frames, results or hellos into it, or hear its commands. Root may, as everywhere.
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
    """Process, user and group of a connection, as they were when it was made."""

    pid: int
    uid: int
    gid: int


def peer_of(connection: socket.socket) -> Peer:
    """The process at the other end. Raises `OSError` for what is no unix socket."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Peer(*_CREDENTIALS.unpack(data))


class Owners:
    """Which user each run belongs to."""

    def __init__(self, *, any_user: bool, own_uid: int | None = None) -> None:
        self._any_user = any_user
        self._own_uid = os.getuid() if own_uid is None else own_uid
        self._owners: dict[str, int] = {}

    def may_connect(self, peer: Peer) -> bool:
        """Whether this user is served at all."""
        return self._any_user or peer.uid in (0, self._own_uid)

    def claim(self, run: str, peer: Peer) -> bool:
        """Whether this user may speak for the run; the first who does owns it."""
        owner = self._owners.setdefault(run, peer.uid)
        return peer.uid in (0, owner)

    def owner(self, run: str) -> int | None:
        """The user id of a run's owner; None: nobody has spoken for it."""
        return self._owners.get(run)

    def release(self, run: str) -> None:
        """The run is over: its name is free."""
        self._owners.pop(run, None)
