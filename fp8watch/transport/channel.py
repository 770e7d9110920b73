"""The training thread's side of the transport: queues messages and takes replies without waiting.

`send`, `take` and `notes` only move objects between deques. Encoding and all system calls happen on the transport
thread (`fp8watch.transport.link`), but for the one that wakes it (`fp8watch.transport.bell`).
"""

from __future__ import annotations

import atexit
import logging
import time
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from fp8watch.errors import BadInput
from fp8watch.records import Message, Reply
from fp8watch.settings import Settings
from fp8watch.transport import forks, places
from fp8watch.transport.link import Link
from fp8watch.transport.opening import Opening
from fp8watch.transport.pending import Outgoing
from fp8watch.transport.process import AgentProcess
from fp8watch.transport.queue import OutgoingQueue

logger = logging.getLogger(__name__)

EXIT_FLUSH_SECONDS = 1.0
"""How long interpreter exit may wait for a channel that was not closed."""
_SCHEME = "unix://"

T = TypeVar("T")


class Channel:
    """A rank's connection to its agent: the embedded process, or the one that `settings.agent` names.

    The connection is opened by the first `set_preamble` or `send`. Only `close` and `await_agent` wait, up to their
    timeouts. Only the constructor raises: `BadInput` for an address other than `unix:///path`. In a forked child the
    channel is dead: `send` drops silently.
    """

    def __init__(self, *, run: str, settings: Settings, local_rank: int = 0) -> None:
        self._settings = settings
        self._queue = OutgoingQueue(settings.queue_frames)
        self._dropped: Counter[str] = Counter()
        self._initial_notes: deque[str] = deque()
        self._is_closed = False
        self._is_started = False
        self._is_forked = False
        self._link: Link | None = None
        address, process = self._resolve(run, local_rank)
        if address is not None:
            try:
                self._link = Link(
                    address=address, settings=settings, queue=self._queue, process=process, dropped_before=self._dropped
                )
            except OSError as error:
                self._initial_notes.append(f"transport could not start ({error}); training goes on unwatched")
        forks.watch(self)
        atexit.register(_close_at_exit, weakref.ref(self))

    @property
    def dropped(self) -> dict[str, int]:
        """Messages dropped so far, by reason: queue_full, disconnected, too_large, unencodable, closed, forged,
        ring_full."""
        total = self._dropped + self._queue.overflowed
        if self._link is not None:
            total += self._link.dropped
        return dict(total)

    def count_dropped(self, reason: str, count: int = 1) -> None:
        """Count messages that were dropped elsewhere."""
        self._dropped[reason] += count

    @property
    def is_connected(self) -> bool:
        """Whether an agent is connected now."""
        return self._link is not None and self._link.is_connected

    def await_agent(self, timeout_seconds: float) -> bool:
        """Wait until the agent is connected. False: it is not within `timeout_seconds`, or has been given up."""
        deadline = time.monotonic() + timeout_seconds
        while not self.is_connected and self.is_watched and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.is_connected

    @property
    def is_watched(self) -> bool:
        """Whether an agent is connected or may still be; False if it was given up, or has no address."""
        return self._link is not None and not self._link.has_given_up

    def set_preamble(self, messages: Sequence[Message]) -> None:
        """Set the messages that open every connection: hello, layout, checkpoints. Call it once, before any `send`.

        Send later changes like any other message. A new connection then opens with what was current when its first
        message was queued (`fp8watch.transport.opening`).
        """
        if self._link is not None and not self._is_forked and not self._is_started:
            self._link.open_with(Opening(messages))
            self._start()

    def send(self, message: Outgoing) -> bool:
        """Queue a message, which must not be changed afterwards. False: it was dropped and counted (in a forked child,
        not counted). When the queue is full, the oldest message of its kind is dropped and counted instead."""
        link = self._link
        if self._is_forked:
            return False
        if self._is_closed or link is None or link.has_given_up:
            self._dropped["closed" if self._is_closed else "disconnected"] += 1
            return False
        is_frame = self._queue.put(message, "queue_full" if link.is_connected else "disconnected")
        if not self._is_started:
            self._start()
        elif not is_frame:
            link.look_now()
        return True

    @property
    def has_news(self) -> bool:
        """Whether `take` or `notes` would return anything."""
        link = self._link
        return bool(self._initial_notes or (link is not None and (link.inbox or link.notes)))

    def take(self) -> list[Reply]:
        """Replies that have arrived since the last call, oldest first."""
        return [] if self._link is None else _drain(self._link.inbox)

    def notes(self) -> list[str]:
        """Messages for the user, each returned once: restarts, an absent agent, the agent's own warnings."""
        notes = _drain(self._initial_notes)
        return notes if self._link is None else notes + _drain(self._link.notes)

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Send what is queued, waiting at most `timeout_seconds` + 0.5 s, and close. A second call does nothing."""
        if self._is_closed or self._is_forked:
            return
        self._is_closed = True
        if self._link is not None and self._is_started:
            self._link.stop(time.monotonic() + timeout_seconds)
            self._link.finished.wait(timeout_seconds + 0.5)

    def after_fork_in_child(self) -> None:
        """Called by `fp8watch.transport.forks`."""
        self._is_forked = True
        if self._link is not None:
            self._link.close_in_child()

    def _start(self) -> None:
        if self._is_started or self._link is None or self._is_closed:
            return
        self._is_started = True
        try:
            self._link.start()
        except RuntimeError as error:  # no thread can be started, or the interpreter is shutting down
            self._link.has_given_up = True
            self._initial_notes.append(f"transport could not start ({error}); training goes on unwatched")

    def _resolve(self, run: str, local_rank: int) -> tuple[Path | None, AgentProcess | None]:
        if self._settings.agent is not None:
            return agent_address(self._settings.agent), None
        try:
            address = places.socket_path(self._settings.dir, run)
        except OSError as error:
            self._initial_notes.append(f"{error}; training goes on unwatched")
            return None, None
        if local_rank != 0:
            return address, None
        return address, AgentProcess(run=run, socket=address, settings=self._settings)


def agent_address(agent: str) -> Path:
    """The path in `unix:///path`. Raises `BadInput` for anything else."""
    path = agent.removeprefix(_SCHEME)
    if path == agent or not path.startswith("/"):
        raise BadInput([f"FP8WATCH_AGENT: {agent!r} is not of the form unix:///path/of/agent.sock"])
    return Path(path)


def _drain(items: deque[T]) -> list[T]:
    taken: list[T] = []
    while items:
        try:
            taken.append(items.popleft())
        except IndexError:  # the other thread has dropped the oldest item of a full deque
            break
    return taken


def _close_at_exit(reference: weakref.ref[Channel]) -> None:
    channel = reference()
    if channel is not None:
        channel.close(EXIT_FLUSH_SECONDS)
