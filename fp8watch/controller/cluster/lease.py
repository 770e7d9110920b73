"""Which controller decides: a lease in Redis that its holder keeps renewing, with a term that only ever grows.

The term is the fencing token. Every commit carries it (`fp8watch.controller.cluster.outbox`), and Redis refuses commits
of an older term, so a holder that was frozen past the end of its lease cannot write when it wakes up. In addition, a
holder steps down by its own monotonic clock if it could not renew in time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fp8watch.controller.cluster.redis_keys import LEASE, TERM
from fp8watch.controller.cluster.redis_link import RedisLink

MAX_OTHERS = 10
"""Cap on what is left of another holder's lease, in multiples of our own lease time. Redis stores its end as a time of
day: if the clock of its machine is set back, the lease of a holder that dies then would end only hours later."""
_ACQUIRE = """
local held = redis.call('GET', KEYS[1])
if held and string.sub(held, (string.find(held, ':', 1, true) or 0) + 1) ~= ARGV[1] then
  if redis.call('PTTL', KEYS[1]) > tonumber(ARGV[4]) then redis.call('PEXPIRE', KEYS[1], ARGV[4]) end
  return {0, held}
end
local known = tonumber(redis.call('GET', KEYS[2]) or '-1')
local term = math.max(known, tonumber(ARGV[3])) + 1
redis.call('SET', KEYS[2], term)
redis.call('SET', KEYS[1], term .. ':' .. ARGV[1], 'PX', ARGV[2])
return {term, tostring(known)}
"""
_RENEW = """
local held = redis.call('GET', KEYS[1])
if held == ARGV[1] then redis.call('PEXPIRE', KEYS[1], ARGV[2]) return 1 end
if held then return -1 end
return 0
"""
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


@dataclass(frozen=True, slots=True)
class Held:
    """An acquired lease. `is_unbroken`: nobody else has held it since we did, so what we remember is still true."""

    term: int
    is_unbroken: bool


class Lease:
    """The lease as seen by one candidate. `holder` is unique to this process; `clock` is monotonic, in seconds."""

    def __init__(self, link: RedisLink, holder: str, seconds: float, clock: Callable[[], float]) -> None:
        self._redis: Any = link.client
        self.holder = holder
        self._seconds = seconds
        self._clock = clock
        self._until = 0.0
        self._renewed = 0.0
        self.term = 0
        """Term of the current or last lease held; 0: none yet."""
        self.seen = ""
        """`term:holder` of another process that holds the lease; empty if none does."""

    @property
    def is_held(self) -> bool:
        """Whether we may act: by our own clock the lease has not expired."""
        return self._clock() < self._until

    def acquire(self) -> Held | None:
        """Try to acquire the lease; None if another process holds it. Raises `redis.RedisError`."""
        asked = self._clock()
        milliseconds = int(self._seconds * 1000)
        answer = self._redis.eval(
            _ACQUIRE, 2, LEASE, TERM, self.holder, milliseconds, self.term, MAX_OTHERS * milliseconds
        )
        term, other = int(answer[0]), bytes(answer[1]).decode()
        if term == 0:
            self.seen = other
            return None
        # -1: Redis has lost the term, and with it any trace of another holder in between.
        held = Held(term=term, is_unbroken=self.term > 0 and int(other) in (self.term, -1))
        # Counted from before the call: Redis may have started the lease at any time since.
        self.term, self._until, self._renewed, self.seen = term, asked + self._seconds, asked, ""
        return held

    def renew(self) -> bool:
        """Extend the lease if a third of its time has passed. Returns False if it is lost and must be acquired again.

        Raises `redis.RedisError`.
        """
        asked = self._clock()
        if asked - self._renewed < self._seconds / 3:
            return self.is_held
        value = f"{self.term}:{self.holder}"
        if int(self._redis.eval(_RENEW, 1, LEASE, value, int(self._seconds * 1000))) != 1:
            self._until = 0.0
            return False
        self._until, self._renewed = asked + self._seconds, asked
        return True

    def release(self) -> None:
        """Release the lease, so that others need not wait until it expires. Raises `redis.RedisError`."""
        if self.is_held:
            self._until = 0.0
            self._redis.eval(_RELEASE, 1, LEASE, f"{self.term}:{self.holder}")
