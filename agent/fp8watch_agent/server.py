"""The socket server. Passes messages of local ranks to the run's session, and the session's replies to the ranks."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from fp8watch import wire
from fp8watch.records import Command, Goodbye, Hello, LedgerUpdate, Message, Reply, Welcome
from fp8watch_agent.connection import Connection
from fp8watch_agent.lifecycle import Lifecycle, RankKey
from fp8watch_agent.metrics_state import MetricsState
from fp8watch_agent.peers import OWNER_ONLY, Owners, Peer, peer_of

logger = logging.getLogger(__name__)
LIFECYCLE_SECONDS = 0.25
TICK_SECONDS = 1.0


class Session(Protocol):
    """The session of a run, as the server uses it. Replies go to all ranks of the run, a `Welcome` to the sender
    only."""

    run: str

    def receive(self, message: Message) -> list[Reply]:
        """Process a rank's message."""

    def lost(self, rank: int) -> list[Reply]:
        """A rank disconnected without goodbye and did not come back."""

    def tick(self) -> list[Reply]:
        """Called about once a second."""

    def backlog(self) -> list[Reply]:
        """Replies for a rank that has just connected."""

    def take(self, reply: Command | LedgerUpdate) -> list[Reply]:
        """Process a reply from the cluster's controller."""

    def contested(self, why: str) -> None:
        """The cluster's controller refuses this node's part of the run; empty: no longer."""

    def news(self) -> Welcome | None:
        """A message for all ranks, if there is a new one."""

    def questions(self) -> Welcome | None:
        """A message for one rank, which logs it for all; taken only when one is connected."""

    def close(self) -> None:
        """The run is over on this node."""


class AgentServer:
    """Serves until `stop` or the end of the lifecycle. `open_session` must not raise."""

    def __init__(
        self,
        *,
        lifecycle: Lifecycle,
        metrics: MetricsState,
        open_session: Callable[[str], Session],
        only_run: str | None = None,
        parent_pid: int | None = None,
        owners: Owners | None = None,
    ) -> None:
        self._owners = owners or Owners(any_user=False)
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._open_session = open_session
        self._only_run = only_run
        self._parent_pid = parent_pid
        self._sessions: dict[str, Session] = {}
        self._connections: dict[RankKey, Connection] = {}
        self._handlers: dict[asyncio.Task[None], Connection] = {}
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Stop serving. Safe in a signal handler of the event loop."""
        self._stopping.set()

    def deliver(self, reply: Command | LedgerUpdate) -> None:
        """Pass a reply from the cluster's controller to its run. Called on the event loop's thread."""
        session = self._sessions.get(reply.run)
        if session is not None:
            self._route(reply.run, session.take(reply), None)

    def contested(self, run: str, why: str) -> None:
        """The cluster's controller refuses this node's part of a run; empty: no longer. Called on the event loop's
        thread."""
        if (session := self._sessions.get(run)) is not None:
            session.contested(why)
            self._route(run, [], None)

    async def serve(self, listener: socket.socket) -> None:
        """Serve on a bound, listening socket. Closes all sessions at the end."""
        if self._only_run is not None:
            self._session(self._only_run)
        server = await asyncio.start_unix_server(self._handle, sock=listener)
        try:
            await self._watch()
        finally:
            server.close()
            for connection in self._handlers.values():
                connection.close()
            if self._handlers:
                await asyncio.wait(list(self._handlers), timeout=1.0)
            for run in list(self._sessions):
                self._end_session(run, "lost")

    async def _watch(self) -> None:
        next_tick = time.monotonic() + TICK_SECONDS
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), LIFECYCLE_SECONDS)
            now = time.monotonic()
            for key in self._lifecycle.newly_lost(now):
                self._gone(key, "lost")
            if now >= next_tick:
                next_tick = now + TICK_SECONDS
                for session in list(self._sessions.values()):
                    self._route(session.run, session.tick(), None)
                self._metrics.remove_ended()
            is_parent_gone = self._parent_pid is not None and os.getppid() != self._parent_pid
            if self._lifecycle.is_over(now, is_parent_gone=is_parent_gone):
                return

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = peer_of(writer.get_extra_info("socket"))
        if not self._owners.may_connect(peer):
            logger.warning("process %d of user %d may not connect", peer.pid, peer.uid)
            self._metrics.drop(self._only_run, "foreign")
            writer.close()
            return
        connection = Connection(reader, writer, self._metrics.drop)
        task = asyncio.current_task()
        assert task is not None
        self._handlers[task] = connection
        try:
            while (messages := await connection.read()) is not None:
                for message in messages:
                    self._receive(connection, message, peer)
        except Exception:
            logger.exception("connection of %s failed", connection.key)
        finally:
            del self._handlers[task]
            connection.close()
            self._closed(connection)

    def _receive(self, connection: Connection, message: Message, peer: Peer) -> None:
        if connection.key is None:  # refused; drop what came with its hello
            return
        run, rank = connection.key
        if self._only_run is not None and run != self._only_run:
            self._metrics.drop(self._only_run, "foreign")
            connection.close()
            return
        if isinstance(message, Hello):
            if not self._owners.claim(run, peer):
                self._reject(connection, f"run {run} belongs to another user of this node")
                return
            before = self._connections.get(connection.key)
            if before is not None and before is not connection:
                if before.pid != message.pid:
                    self._refuse(connection, before)
                    return
                before.close()  # the rank reconnected before its old connection was closed
            message = msgspec.structs.replace(message, owner=self._owners.owner(run))
            connection.pid = message.pid
            self._connections[connection.key] = connection
            self._lifecycle.connected(connection.key)
        if isinstance(message, Goodbye):
            self._lifecycle.goodbye((run, rank))
        session = self._session(run)
        self._route(run, session.receive(message), connection)
        if isinstance(message, Hello):
            for reply in session.backlog():
                connection.send(reply)

    def _refuse(self, connection: Connection, holder: Connection) -> None:
        """Refuse the second of two processes with the same rank; they would disconnect each other for ever."""
        assert connection.key is not None
        run, rank = connection.key
        warning = (
            f"process {holder.pid} already trains as rank {rank} of run {run}: this one is not watched; "
            "give it another name (FP8WATCH_RUN)"
        )
        self._reject(connection, warning)

    def _reject(self, connection: Connection, warning: str) -> None:
        assert connection.key is not None
        run = connection.key[0]
        logger.warning("%s", warning)
        self._metrics.drop(run, "foreign")
        connection.send(Welcome(wire_version=wire.WIRE_VERSION, run=run, term=0, warnings=[warning]))
        connection.key = None
        connection.close(is_flushed=True)

    def _closed(self, connection: Connection) -> None:
        key = connection.key
        if key is None or self._connections.get(key) is not connection:
            return
        del self._connections[key]
        if self._lifecycle.closed(key, time.monotonic()):
            self._gone(key, "ended")

    def _gone(self, key: RankKey, state: str) -> None:
        run, rank = key
        session = self._sessions.get(run)
        if session is not None and state == "lost":
            logger.warning("rank %d of run %s is lost: it left without a goodbye and did not reconnect", rank, run)
            self._route(run, session.lost(rank), None)
        if self._lifecycle.is_run_over(run):
            self._end_session(run, state)
        else:
            self._metrics.rank_left(run, rank)

    def _route(self, run: str, replies: list[Reply], sender: Connection | None) -> None:
        for reply in replies:
            if isinstance(reply, Welcome):
                if sender is not None:
                    sender.send(reply)
            else:
                self._broadcast(reply.run, reply)
        session = self._sessions.get(run)
        news = None if session is None else session.news()
        if news is not None:
            self._broadcast(run, news)
        first = min((key for key in self._connections if key[0] == run), default=None)
        asked = None if session is None or first is None else session.questions()
        if asked is not None and first is not None:
            self._connections[first].send(asked)

    def _broadcast(self, run: str, reply: Reply) -> None:
        for key, connection in list(self._connections.items()):
            if key[0] == run:
                connection.send(reply)

    def _session(self, run: str) -> Session:
        if run not in self._sessions:
            self._sessions[run] = self._open_session(run)
        return self._sessions[run]

    def _end_session(self, run: str, state: str) -> None:
        session = self._sessions.pop(run, None)
        self._owners.release(run)
        if session is not None:
            session.close()  # first: it sends its last frames, and readers of "ended" find the endpoint ended
            self._metrics.run_over(run, state)
            logger.info("run %s is over (%s)", run, state)


def listen(path: Path, mode: int = OWNER_ONLY) -> socket.socket:
    """Bind and listen on a Unix socket with the given mode; by default only this user can connect.

    Replaces a socket that nobody serves. Raises `OSError` if another agent serves it (EADDRINUSE) or if the path is
    anything else, also a link (EEXIST); that is left alone.
    """
    _clear(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        mask = os.umask(0o777 & ~mode)
        try:
            listener.bind(os.fspath(path))
        finally:
            os.umask(mask)
        listener.listen(128)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _clear(path: Path) -> None:
    """Remove the socket of an agent that is gone, and nothing else."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "something that is no socket"
        reason = f"{kind} is at this path, and only a socket is replaced: move it, or choose another --socket"
        raise FileExistsError(errno.EEXIST, reason)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.settimeout(1.0)
            probe.connect(os.fspath(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            remove_own(path, found)
        else:
            raise OSError(errno.EADDRINUSE, f"another agent serves {path}")


def remove_own(path: Path, identity: os.stat_result) -> None:
    """Remove a socket if it is still the one of `identity`. The path alone may belong to another agent by now."""
    with contextlib.suppress(FileNotFoundError):
        now = os.lstat(path)
        if stat.S_ISSOCK(now.st_mode) and (now.st_dev, now.st_ino) == (identity.st_dev, identity.st_ino):
            path.unlink()
