"""The transport thread: connects, sends what is queued, receives replies, keeps the background process alive.

Everything slow is done here: encoding, system calls, waiting, starting a process. It shares only the queue, the inbox,
the notes and a few plain attributes with the training thread, all without locks.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from fp8watch import wire
from fp8watch.errors import WireError
from fp8watch.records import Goodbye, Message, Reply, StepFrame, Welcome
from fp8watch.settings import Settings
from fp8watch.transport.bell import Bell
from fp8watch.transport.opening import Opening
from fp8watch.transport.pending import as_message
from fp8watch.transport.process import AgentProcess
from fp8watch.transport.queue import OutgoingQueue
from fp8watch.transport.rhythm import Rhythm

logger = logging.getLogger(__name__)

CLOSING_RETRY_SECONDS = 0.02
"""Between two tries to connect while closing."""
PAUSE_SECONDS, SHORT_PAUSE_SECONDS = 0.001, 0.0001
"""Pauses after each message of a backlog; the short one is used when frames may be lost. A thread that releases the GIL
for a system call takes it back before another thread has woken up. Without a pause, the training thread would wait for
`sys.getswitchinterval()` (5 ms) each time it needs the GIL."""
FIRST_RETRY_SECONDS = 0.05
MAX_RETRY_SECONDS = 1.0
STABLE_SECONDS = 2.0
"""After a connection that lasted this long, retries start again at `FIRST_RETRY_SECONDS`."""
ABSENT_SECONDS = 1.0
"""How long closing waits for an absent agent that is not started by this process."""
FULL_SECONDS = 0.2
"""How long to wait for room in the socket before anything else is looked at."""
READ_BYTES = 256 * 1024
MAX_TOLD = 256
"""Texts of the agent that are known again when it repeats them, as at each new connection."""
LAST_READS = 16
"""Most reads of what the agent said before it stopped listening: many times what a socket holds. It may go on talking.
"""


class Link(threading.Thread):
    """A connection to an agent, made again whenever it breaks. `process` None: the agent is not started from here."""

    def __init__(
        self,
        *,
        address: Path,
        settings: Settings,
        queue: OutgoingQueue,
        process: AgentProcess | None,
        dropped_before: Mapping[str, int] | None = None,
    ) -> None:
        """`dropped_before`: messages that the training thread dropped before they reached the queue, by reason. Raises
        `OSError` when the process has no file descriptor left."""
        super().__init__(name="fp8watch-transport", daemon=True)
        self._address = address
        self._settings = settings
        self._queue = queue
        self._process = process
        self._dropped_before = {} if dropped_before is None else dropped_before
        self._socket: socket.socket | None = None
        self._splitter = wire.Splitter()
        self._preamble: deque[Message] = deque()
        self._opening = Opening([])
        self._current: Message | None = None
        self._pending = memoryview(b"")
        self._rhythm = Rhythm()
        self._bell = Bell()
        self._stopping = threading.Event()
        self._deadline = 0.0
        self._warned: set[str] = set()
        self._told: dict[str, None] = {}
        """What the agent has said last, oldest first."""
        self.inbox: deque[Reply] = deque(maxlen=4096)
        self.notes: deque[str] = deque(maxlen=256)
        self.dropped: Counter[str] = Counter()
        """Messages that this thread has dropped, by reason; the queue counts its own."""
        self.is_connected = False
        self.has_given_up = False
        self.num_connections = 0
        self.finished = threading.Event()

    def open_with(self, opening: Opening) -> None:
        """Set the opening of connections. Only before `start`."""
        self._opening = opening

    def run(self) -> None:
        """Thread body. Ends after `stop`, or when the process is given up."""
        try:
            self._run()
            self._linger()
        except Exception as error:
            logger.exception("fp8watch transport failed")
            self._give_up(f"transport failed ({error!r}); training goes on unwatched")
        finally:
            self._disconnect()
            self._say_what_is_left()
            self.finished.set()
            if self._process is not None:
                if self.num_connections == 0:
                    self._process.terminate()
                self._process.reap(self._settings.end_grace_seconds + 5.0)

    def stop(self, deadline: float) -> None:
        """Send what is queued until `deadline` (time.monotonic), then close. For an absent agent that is not started
        from here, the limit is `ABSENT_SECONDS`."""
        if self._process is None and not self.is_connected:
            deadline = min(deadline, time.monotonic() + ABSENT_SECONDS)
        self._deadline = deadline
        self._stopping.set()
        self._bell.ring()

    def look_now(self) -> None:
        """Look into the queue at once. For messages that are waited for and are few: it costs the caller a system
        call."""
        self._bell.ring()

    def close_in_child(self) -> None:
        """Close the socket in a forked child. Takes no lock."""
        if self._socket is not None:
            self._socket.close()

    def _run(self) -> None:
        retry_seconds = FIRST_RETRY_SECONDS
        out_since = in_since = time.monotonic()
        is_out_noted = False
        while not self._is_done():
            if self._socket is not None:
                self._exchange(self._socket)
                if self._socket is None:
                    if time.monotonic() - in_since > STABLE_SECONDS:
                        retry_seconds = FIRST_RETRY_SECONDS
                    out_since = time.monotonic()
                    self._stopping.wait(retry_seconds)
                continue
            if self._connect():
                in_since = time.monotonic()
                if is_out_noted:
                    self.notes.append(f"agent at {self._address} reached again")
                    is_out_noted = False
                retry_seconds = min(retry_seconds * 1.5, MAX_RETRY_SECONDS)
                continue
            if self._process is not None and not self._keep_process(self._process):
                return
            if not is_out_noted and time.monotonic() - out_since > self._settings.connect_seconds:
                is_out_noted = True
                self.notes.append(
                    f"no agent at {self._address} for {self._settings.connect_seconds:g} s: "
                    "frames are held, then dropped and counted; still trying"
                )
            if self._stopping.is_set():
                time.sleep(CLOSING_RETRY_SECONDS)
            else:
                self._stopping.wait(retry_seconds)
            retry_seconds = min(retry_seconds * 1.5, MAX_RETRY_SECONDS)

    def _is_done(self) -> bool:
        if not self._stopping.is_set():
            return False
        return time.monotonic() >= self._deadline or (
            self.is_connected and not self._preamble and not self._pending and len(self._queue) == 0
        )

    def _connect(self) -> bool:
        candidate = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Set before connecting, so that a child forked at any moment closes the descriptor.
        self._socket = candidate
        try:
            candidate.settimeout(0.5)  # connect blocks when the agent's backlog is full
            candidate.connect(os.fspath(self._address))
            candidate.setblocking(False)
        except OSError as error:
            logger.debug("cannot connect to %s: %s", self._address, error)
            candidate.close()
            self._socket = None
            return False
        self._splitter = wire.Splitter()
        self._preamble = deque(self._opening.messages())
        self._pending = memoryview(b"")
        unsent, self._current = self._current, None
        if unsent is not None and unsent not in self._preamble:
            self._preamble.append(unsent)  # the last connection broke while it was being sent
        self.num_connections += 1
        self.is_connected = True
        return True

    def _linger(self) -> None:
        """Shut down the sending side, and read until the agent closes, within the deadline.

        Closing the socket while a reply is on its way would reset the connection and lose what the agent has not read
        yet.
        """
        connection = self._socket
        if connection is None or not self.is_connected:
            return
        poller = select.poll()
        poller.register(connection, select.POLLIN)
        try:
            connection.shutdown(socket.SHUT_WR)
            while (seconds := self._deadline - time.monotonic()) > 0:
                if poller.poll(seconds * 1000) and not connection.recv(READ_BYTES):
                    return
        except OSError as error:
            logger.debug("connection to %s broke at its end: %s", self._address, error)

    def _disconnect(self) -> None:
        self.is_connected = False
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    def _exchange(self, connection: socket.socket) -> None:
        """Send what is queued, then wait for a reply, for room in the socket, or until the next look."""
        try:
            if not self._pending:
                self._load_next()
            if self._pending:
                self._send(connection)
            if self._await(connection) and not self._receive(connection):
                self._disconnect()
        except BlockingIOError:
            return
        except OSError as error:
            logger.debug("connection to %s broke: %s", self._address, error)
            with suppress(OSError):
                self._receive_last(connection)
            self._disconnect()

    def _send(self, connection: socket.socket) -> None:
        # Without asking first whether there is room: after each system call the GIL has to be taken from training.
        with suppress(BlockingIOError):
            self._pending = self._pending[connection.send(self._pending) :]
        if not self._pending and self._current is not None:
            self._opening.passed(self._current)
            self._current = None
            self._pause()

    def _await(self, connection: socket.socket) -> bool:
        """Wait for a reply, for room in the socket, for the bell, or until the next look. True: there is something to
        read, or the connection is closed."""
        poller = select.poll()
        poller.register(connection, select.POLLIN | (select.POLLOUT if self._pending else 0))
        poller.register(self._bell, select.POLLIN)
        events = dict(poller.poll(1000 * self._seconds_to_wait()))
        if events.pop(self._bell.fileno(), 0):
            self._bell.quieten()
        return any(event != select.POLLOUT for event in events.values())

    def _seconds_to_wait(self) -> float:
        if self._pending:
            left = self._deadline - time.monotonic() if self._stopping.is_set() else FULL_SECONDS
            return min(max(left, 0.0), FULL_SECONDS)
        is_work_left = self._preamble or self._queue or self._stopping.is_set()
        return 0.0 if is_work_left else self._rhythm.seconds()

    def _pause(self) -> None:
        """Let the training thread run between the messages of a backlog; returns at once after `stop`."""
        if left := len(self._queue):
            is_late = 2 * left > self._settings.queue_frames
            self._stopping.wait(SHORT_PAUSE_SECONDS if is_late else PAUSE_SECONDS)

    def _load_next(self) -> None:
        outgoing = self._preamble.popleft() if self._preamble else self._queue.take()
        if outgoing is None:
            return
        try:
            message = as_message(outgoing)
            if isinstance(message, StepFrame):
                self._rhythm.took(message.time_unix)
            if isinstance(message, StepFrame | Goodbye) and (dropped := self._all_dropped()):
                message = msgspec.structs.replace(message, dropped=dropped)
            self._pending = memoryview(wire.frame(message))
            self._current = message
        except WireError as error:
            self.dropped["too_large"] += 1
            self._warn_once(f"message dropped: {error}")
        except Exception as error:  # a value that msgpack cannot encode, or a frame that cannot be built
            self.dropped["unencodable"] += 1
            self._warn_once(f"message dropped: {error!r}")

    def _all_dropped(self) -> dict[str, int]:
        queued, before = self._queue.overflowed, self._dropped_before
        if not (self.dropped or queued or before):
            return {}  # nearly always
        # Copies, each made in one operation, because the training thread goes on counting.
        return dict(self.dropped + Counter(dict(queued)) + Counter(dict(before)))

    def _receive(self, connection: socket.socket) -> bool:
        """Read what has arrived. False: end of stream, or bytes that are no valid message."""
        data = connection.recv(READ_BYTES)
        if not data:
            return False
        try:
            for body in self._splitter.feed(data):
                self._accept(body)
        except WireError as error:
            self._warn_once(f"agent at {self._address} does not speak fp8watch: {error}")
            return False
        return True

    def _receive_last(self, connection: socket.socket) -> None:
        """Read what the agent said before it closed the connection or stopped listening. Raises `OSError`."""
        for _ in range(LAST_READS):
            if not self._receive(connection):
                return

    def _accept(self, body: bytes) -> None:
        try:
            reply = wire.unpack_reply(body)
        except WireError as error:
            self._warn_once(f"reply of the agent was not understood: {error}")
            return
        if isinstance(reply, Welcome):
            for warning in reply.warnings:
                self._tell_once(warning)
        self.inbox.append(reply)

    def _keep_process(self, process: AgentProcess) -> bool:
        """Start the process unless it runs. False: it is given up."""
        if process.is_running() or (self._stopping.is_set() and process.num_starts > 0):
            return True  # a run that ends before the first start still starts it, to be recorded
        is_restart = process.num_starts > 0
        if is_restart and not process.has_restarts_left():
            self._give_up(
                f"background process {process.ending()} again (log: {process.log}); training goes on unwatched"
            )
            return False
        before = process.ending()
        try:
            process.start()
        except OSError as error:
            self._give_up(f"background process could not be started ({error}); training goes on unwatched")
            return False
        if is_restart:
            self.notes.append(f"background process {before}; restarted as {process.pid} (log: {process.log})")
        return True

    def _give_up(self, note: str) -> None:
        self.notes.append(note)
        self.has_given_up = True
        while self._queue.take() is not None:
            self.dropped["disconnected"] += 1

    def _say_what_is_left(self) -> None:
        """Log the number of unsent messages at the end, when the counters are no longer read."""
        left = len(self._queue) + (self._current is not None)
        if left and not self.has_given_up:
            logger.warning("fp8watch: %d messages were not sent: no agent at %s took them", left, self._address)

    def _tell_once(self, warning: str) -> None:
        """Note what the agent says. A long run may ask a person any number of questions, so the oldest is forgotten and
        no new one withheld."""
        if warning not in self._told:
            self.notes.append(warning)
            self._told[warning] = None
            if len(self._told) > MAX_TOLD:
                del self._told[next(iter(self._told))]

    def _warn_once(self, warning: str) -> None:
        if warning not in self._warned and len(self._warned) < 64:
            self._warned.add(warning)
            self.notes.append(warning)
