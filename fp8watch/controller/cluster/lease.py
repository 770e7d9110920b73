"""Which controller decides: a lease in Redis, renewed while its holder works, with a term that only ever grows.

The term is the fencing token. It goes into every commit (`fp8watch.controller.cluster.outbox`), and Redis refuses one
of an older term: a holder that was frozen past its lease can write nothing when it wakes. Besides, a holder steps down
by its own monotonic clock when it could not renew in time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fp8watch.controller.cluster.redis_keys import LEASE, TERM
from fp8watch.controller.cluster.redis_link import RedisLink

MAX_OTHERS = 10
"""Times our own length: what a lease of another has left at most. Its end is a time of day, and if the clock of Redis'
machine is set back, that of a holder who dies just then would lie hours ahead."""
_ACQUIRE = """
local held = redis.call('GET', KEYS[1])
if held and not string.find(held, ':' .. ARGV[1], 1, true) then
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
    """A lease that was given. `is_unbroken`: nobody else held it since our last one, so what we remember is true."""

    term: int
    is_unbroken: bool


class Lease:
    """One candidate. `holder` is unique to this process; `clock` is monotonic, in seconds."""

    def __init__(self, link: RedisLink, holder: str, seconds: float, clock: Callable[[], float]) -> None:
        self._redis: Any = link.client
        self.holder = holder
        self._seconds = seconds
        self._clock = clock
        self._until = 0.0
        self._renewed = 0.0
        self.term = 0
        """Of the lease held now or last; 0: none yet."""
        self.seen = ""
        """`term:holder` of who holds it, when somebody else does."""

    @property
    def is_held(self) -> bool:
        """Whether we may act: by our own clock the lease has not ended."""
        return self._clock() < self._until

    def acquire(self) -> Held | None:
        """Try to get it; None: somebody else has it. Raises `redis.RedisError`."""
        asked = self._clock()
        milliseconds = int(self._seconds * 1000)
        answer = self._redis.eval(
            _ACQUIRE, 2, LEASE, TERM, self.holder, milliseconds, self.term, MAX_OTHERS * milliseconds
        )
        term, other = int(answer[0]), bytes(answer[1]).decode()
        if term == 0:
            self.seen = other
            return None
        # -1: Redis has lost its terms, and with them whoever might have come between.
        held = Held(term=term, is_unbroken=self.term > 0 and int(other) in (self.term, -1))
        # Counted from before the call: Redis may have begun counting at any time since.
        self.term, self._until, self._renewed, self.seen = term, asked + self._seconds, asked, ""
        return held

    def renew(self) -> bool:
        """Keep it for another while, if a third of its time has passed; False: it is lost, and must be acquired again.

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
        """Give it up, so that another need not wait for its end. Raises `redis.RedisError`."""
        if self.is_held:
            self._until = 0.0
            self._redis.eval(_RELEASE, 1, LEASE, f"{self.term}:{self.holder}")
