"""One reply for all who ask at once: /metrics is made by one thread at a time, and not again for a moment after.

Making it takes the interpreter away from what else the process does, which is to receive the frames of training ranks.
Ten who ask at once, or one who asks without a pause, must cost little more than one who asks now and then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
"""As in WSGI."""
PAUSE = 10.0
"""A reply is given again for this many times as long as it took to make."""
MAX_AGE_SECONDS = 1.0
MAX_KINDS = 8
"""Replies kept: formats and encodings that clients accept. Prometheus servers of one version ask for the same."""


@dataclass(frozen=True, slots=True)
class _Reply:
    status: str
    headers: list[tuple[str, str]]
    body: list[bytes]
    good_until: float


class SharedReply:
    """A WSGI app around another whose replies to GET depend on nothing but what the client accepts and asks for.

    `clock` is monotonic, in seconds.
    """

    def __init__(self, app: App, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._clock = clock
        self._making = threading.Lock()
        self._replies: dict[tuple[str, ...], _Reply] = {}

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer; whoever comes while a reply is made waits for it."""
        if environ.get("REQUEST_METHOD") != "GET":
            return self._app(environ, start_response)
        asked = ("HTTP_ACCEPT", "HTTP_ACCEPT_ENCODING", "PATH_INFO", "QUERY_STRING")
        key = tuple(str(environ.get(name, "")) for name in asked)
        with self._making:
            reply = self._replies.get(key)
            if reply is None or self._clock() >= reply.good_until:
                reply = self._make(environ)
                self._replies.pop(key, None)
                self._replies[key] = reply
                while len(self._replies) > MAX_KINDS:
                    del self._replies[next(iter(self._replies))]
        start_response(reply.status, reply.headers.copy())  # the server adds its own
        return reply.body

    def _make(self, environ: dict[str, Any]) -> _Reply:
        said: list[tuple[str, list[tuple[str, str]]]] = []
        began = self._clock()
        body = list(self._app(environ, lambda status, headers, *_: said.append((status, headers))))
        now = self._clock()
        status, headers = said[0]
        return _Reply(status, headers, body, now + min(PAUSE * (now - began), MAX_AGE_SECONDS))
