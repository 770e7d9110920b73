"""The thread by which a controller announces that it is there, active or standing by, and which keys it has.

Nothing is decided by it: it is for `fp8watch doctor --cluster`, which else could see the active controller only, and of
that only the name. On a connection of its own, so that what goes wrong here does not hold up decisions.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping

from fp8watch import __version__
from fp8watch.controller.cluster.redis_keys import CONTROLLERS
from fp8watch.controller.cluster.redis_link import RedisError, RedisLink, reason_of, words_of
from fp8watch.wire import WIRE_VERSION

logger = logging.getLogger(__name__)
ANNOUNCE_SECONDS = 2.0
FORGET_SECONDS = 600.0
"""A controller that was killed is listed for so long. Every start is listed under a name of its own."""
FORGET_EVERY = 30
"""Announcements between two looks for those."""


class ControllerPresence(threading.Thread):
    """`connect` is called on the thread, again after a failure. `is_active`: whether this controller decides now."""

    def __init__(
        self,
        connect: Callable[[], RedisLink],
        holder: str,
        is_active: Callable[[], bool],
        about: Mapping[str, object],
    ) -> None:
        """`about`: what stays the same, as JSON can hold it."""
        super().__init__(name="fp8watch-presence", daemon=True)
        self._connect = connect
        self._holder = holder
        self._is_active = is_active
        self._about = {
            "pid": os.getpid(), "host": socket.gethostname(), "version": __version__, "wire_version": WIRE_VERSION,
        } | dict(about)  # fmt: skip
        self._ending = threading.Event()
        self._link: RedisLink | None = None
        self._times = 0
        self._has_failed = False

    def stop(self, seconds: float = 2.0) -> None:
        """End, and take this controller off the list."""
        self._ending.set()
        self.join(seconds)

    def run(self) -> None:
        """Thread body."""
        while not self._ending.is_set():
            self._guarded(self._announce)
            self._ending.wait(ANNOUNCE_SECONDS)
        if self._link is not None:
            self._guarded(self._unlist)
            self._link.close()

    def _guarded(self, work: Callable[[RedisLink], None]) -> None:
        try:
            if self._link is None:
                self._link = self._connect()
            work(self._link)
            self._has_failed = False
        except (RedisError, OSError) as error:
            # The controller itself says when Redis is away; here it is the rights of an earlier version.
            level = logging.WARNING if reason_of(error) == "denied" and not self._has_failed else logging.DEBUG
            self._has_failed = True
            logger.log(level, "doctor --cluster will not see this controller: %s", words_of(error))
            if self._link is not None:
                self._link.reset()

    def _announce(self, link: RedisLink) -> None:
        now = float(link.client.time()[0])  # one clock for all controllers
        about = self._about | {"time_unix": now, "is_active": self._is_active()}
        link.client.hset(CONTROLLERS, self._holder, json.dumps(about))
        self._times += 1
        if self._times % FORGET_EVERY == 1:
            listed = link.client.hscan_iter(CONTROLLERS)
            gone = [name for name, body in listed if now - _announced_at(body) > FORGET_SECONDS]
            if gone:
                link.client.hdel(CONTROLLERS, *gone)

    def _unlist(self, link: RedisLink) -> None:
        link.client.hdel(CONTROLLERS, self._holder)


def _announced_at(body: bytes) -> float:
    """When a controller last said what it is; 0: that cannot be read."""
    try:
        return float(json.loads(body)["time_unix"])
    except (ValueError, KeyError, TypeError):
        return 0.0
