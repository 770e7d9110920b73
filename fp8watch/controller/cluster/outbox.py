"""What the active controller writes, in one step a batch: records, commands, what it has read, what it remembers.

The whole commit is one script on the run's slot. It is refused when another controller has claimed the run under a
newer term, and done once however often it is sent: so a command is in the decision log exactly when it is on its way,
and a message of an agent is taken off the list exactly when its effect is kept. `Outbox.command` is the one place
where a command leaves the controller.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fp8watch import wire
from fp8watch.controller.cluster.redis_keys import ACTIVE, GROUP, RUNS, RunKeys
from fp8watch.controller.cluster.redis_link import RedisError
from fp8watch.controller.identity import key_of, step_of
from fp8watch.controller.stores.base import Approval, R
from fp8watch.controller.stores.redis import RedisStore, Write
from fp8watch.records import Command, LedgerUpdate, Reply, RunRecord, StepFrame, Stored

COMMANDS_KEPT = 10_000
"""Commands and ledger updates of a run that stay readable for an agent that was away."""
ENDED_SECONDS = 7 * 86_400
"""How long a run that has ended can be taken up with the controller's memory of it."""
ACK_CHUNK = 512
"""Arguments of one command inside the script, well under Lua's limit of some 8,000."""

_COMMIT = """
local held = redis.call('HMGET', KEYS[1], 'term', 'number')
local term, number = tonumber(held[1] or '-1'), tonumber(held[2] or '-1')
if term > tonumber(ARGV[1]) then return redis.error_reply('FENCED by term ' .. held[1]) end
if term == tonumber(ARGV[1]) and number >= tonumber(ARGV[2]) then return 'again' end
redis.call('HSET', KEYS[1], 'term', ARGV[1], 'number', ARGV[2])
local at = 3
while at <= #ARGV do
  local count = tonumber(ARGV[at])
  local command = {}
  for i = 1, count do command[i] = ARGV[at + i] end
  redis.call(unpack(command))
  at = at + count + 1
end
if term == -1 then return 'lost' end
return 'done'
"""
_CLAIM = """
local held = redis.call('HMGET', KEYS[1], 'term', 'number', 'before', 'number_before')
local term = tonumber(held[1] or '-1')
if term > tonumber(ARGV[1]) then return redis.error_reply('FENCED by term ' .. term) end
local number = tonumber(held[2] or '-1')
if term == tonumber(ARGV[1]) then return {tonumber(held[3] or '-1'), tonumber(held[4] or '-1'), number} end
redis.call('HSET', KEYS[1], 'term', ARGV[1], 'number', '-1', 'before', term, 'number_before', number)
return {term, number, -1}
"""


class Fenced(Exception):
    """Another controller has claimed the run: this one is not the active one any more."""


class Interrupted(BaseException):
    """Redis went away while a message was being dealt with: it is to be dealt with again.

    Not an `Exception`: a run must not begin as an unknown one because its store could not be read.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class _Sealed:
    term: int
    number: int
    writes: list[Write]


class Outbox:
    """A `Store` whose writes wait for `commit`. Reads go to Redis, but for frames: those are the agents'."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._redis: Any = store.link.client
        self._records: dict[str, list[Stored]] = defaultdict(list)
        self._replies: dict[str, list[Reply]] = defaultdict(list)
        self._numbers: dict[str, int] = {}
        self._sealed: dict[str, _Sealed] = {}
        """Commits that were sent and not answered: they are sent again as they were."""
        self.term = 0
        """Of the lease."""
        self.sent = 0

    # What goes out

    def command(self, run: str, replies: Iterable[Reply]) -> None:
        """Commands and ledger updates for a run's ranks, written with the next commit: not before."""
        self._replies[run] += [reply for reply in replies if isinstance(reply, Command | LedgerUpdate)]

    def is_waiting(self, run: str) -> bool:
        """Whether anything is to be written that must not wait."""
        return bool(self._records.get(run) or self._replies.get(run) or run in self._sealed)

    def is_weighty(self, run: str) -> bool:
        """Whether what waits would be written again if the entries behind it were dealt with again: then the memory
        and the entries have to be in the same commit. A run's record may come twice."""
        return bool(self._replies.get(run)) or any(not isinstance(r, RunRecord) for r in self._records.get(run, ()))

    def claim(self, run: str) -> bool:
        """Let nobody of an older term write from now on; False: Redis knew nothing of the run.

        Raises `Fenced` or `redis.RedisError`.
        """
        term, number, own = map(int, self._call(_CLAIM, RunKeys(run), [self.term]))
        sealed = self._sealed.get(run)
        if sealed is not None and (term, number) >= (sealed.term, sealed.number):
            del self._sealed[run]  # it had arrived, only the answer had not
        # A run that has ended and goes on under the same term: what was written before is not to be taken for this.
        is_own = sealed is not None and sealed.term == self.term
        self._numbers[run] = max(own, sealed.number) if is_own and sealed is not None else own
        return term >= 0

    def commit(self, run: str, *, memory: dict[str, bytes], done: list[str]) -> bool:
        """Write everything that waits for a run, with what is remembered and the entries that are done with.

        False: Redis had lost what it knew of the run. Raises `Fenced` or `redis.RedisError`; after the latter
        call it again, with the same or more.
        """
        is_kept = True
        if run in self._sealed:
            is_kept = self._send(run, self._sealed[run].writes)
        keys = RunKeys(run)
        records, self._records[run] = self._records[run], []
        replies, self._replies[run] = self._replies[run], []
        try:
            writes = self._store.writes(run, records)
        except BaseException:
            self._records[run], self._replies[run] = records, replies
            raise
        for reply in replies:
            writes.append(("XADD", keys.commands, "MAXLEN", "~", COMMANDS_KEPT, "*", "b", wire.pack(reply)))
        if memory:
            writes.append(("HSET", keys.state, *(part for pair in memory.items() for part in pair)))
        for start in range(0, len(done), ACK_CHUNK):
            writes.append(("XACK", keys.frames, GROUP, *done[start : start + ACK_CHUNK]))
        return self._send(run, writes) and is_kept

    def _send(self, run: str, writes: list[Write]) -> bool:
        """One commit. It stays sealed until its answer is here: what was decided is not decided anew."""
        sealed = self._sealed.get(run)
        if sealed is None or sealed.term != self.term:
            self._numbers[run] = self._numbers.get(run, -1) + 1
            sealed = self._sealed[run] = _Sealed(self.term, self._numbers[run], writes)
        flat = [argument for write in writes for argument in (len(write), *write)]
        answer = self._call(_COMMIT, RunKeys(run), [sealed.term, sealed.number, *flat])
        del self._sealed[run]
        self.sent += sum(write[0] == "XADD" for write in writes)
        return bool(answer != b"lost")

    def drop_all(self) -> None:
        """Not the active one any more: nothing of this may be written."""
        self._records.clear()
        self._replies.clear()
        self._sealed.clear()
        self._numbers.clear()

    def over(self, run: str) -> None:
        """A run has ended: it is not among the active ones until an agent says so, and what only serves to go on with
        it does not stay for ever."""
        keys = RunKeys(run)
        self._redis.srem(ACTIVE, run)
        self._redis.expire(keys.frames, int(self._store.keep_seconds))
        for key in (keys.state, keys.ranks, keys.fence, keys.commands):
            self._redis.expire(key, ENDED_SECONDS)

    def revive(self, run: str) -> None:
        """A run goes on, perhaps one that had ended or that Redis had lost."""
        keys = RunKeys(run)
        self._redis.sadd(RUNS, run)
        for key in (keys.frames, keys.state, keys.ranks, keys.fence, keys.commands):
            self._redis.persist(key)

    def _call(self, script: str, keys: RunKeys, arguments: list[Any]) -> Any:
        try:
            return self._redis.eval(script, 1, keys.fence, *arguments)
        except Exception as error:
            if "FENCED" in str(error):
                raise Fenced(str(error)) from error
            raise

    # The store, as the controller of runs uses it

    def runs(self) -> list[RunRecord]:
        """As the store, with what waits to be written. Raises `Interrupted`."""
        try:
            known = {record.run: record for record in self._store.runs()}
        except (RedisError, OSError) as error:
            raise Interrupted(error) from error
        for run, records in self._records.items():
            for record in records:
                if isinstance(record, RunRecord):
                    known[run] = record
        return sorted(known.values(), key=lambda record: record.started_unix)

    def append(self, run: str, records: Iterable[Stored]) -> None:
        """Keep for the next commit."""
        self._records[run] += [record for record in records if not isinstance(record, StepFrame)]

    def read(self, run: str, kind: type[R], first_step: int = 0, last_step: int | None = None) -> Iterator[R]:
        """As the store, with what waits to be written: a run that is taken up anew must not miss what was found in the
        same round. No frames. Raises `Interrupted`."""
        if kind is StepFrame:
            return iter(())
        try:
            found = list(self._store.read(run, kind, first_step, last_step))
        except (RedisError, OSError) as error:
            raise Interrupted(error) from error
        spots = {key: spot for spot, record in enumerate(found) if (key := key_of(record)) is not None}
        for record in self._records.get(run, ()):
            step = step_of(record)
            if not isinstance(record, kind) or not (
                step is None or first_step <= step <= (step if last_step is None else last_step)
            ):
                continue
            key = key_of(record)
            if key in spots:
                found[spots[key]] = record
                continue
            if key is not None:
                spots[key] = len(found)
            found.append(record)
        return iter(found)

    def approve(self, approval: Approval) -> None:
        """As the store."""
        self._store.approve(approval)

    def approvals(self, run: str) -> list[Approval]:
        """As the store."""
        return self._store.approvals(run)

    def prune(self, run: str) -> int:
        """Nothing: the agents trim what they send, by a clock that nobody can set (`fp8watch_agent.trim`)."""
        return 0

    def close(self) -> None:
        """Nothing: the store belongs to the caller."""
