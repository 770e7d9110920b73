"""Loopback ports for servers that have to be told theirs.

A port that was only looked up is anybody's until its server is up, and with many processes at once somebody takes it.
A connection that this side ends first keeps it for a minute (TIME_WAIT): meanwhile the kernel gives it to nobody who
asks for any port, and a server that asks for this one has it, as all do that set SO_REUSEADDR.
"""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port that nobody has, and for a minute nobody is given."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
        with socket.create_connection(("127.0.0.1", port)) as client:
            server_side, _ = listener.accept()
            server_side.close()
            client.recv(1)  # its end has come: from now on the port waits
    return port
