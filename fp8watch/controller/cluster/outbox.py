"""What the active controller writes: each commit has records, commands, acknowledgements and the controller's memory.

A commit is one script on the run's slot. It is refused if another controller has claimed the run under a newer term,
and it is executed only once, however often it is sent. So a command is in the decision log exactly if it was sent, and
an agent's message is acknowledged exactly if its effect is stored. `Outbox.command` is the only place where a command
leaves the controller.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fp8watch import wire
from fp8watch.controller.cluster.redis_keys import ACTIVE, GROUP, RUNS, RunKeys
from fp8watch.controller.cluster.redis_link import RedisError
from fp8watch.controller.identity import key_of
from fp8watch.controller.stores.base import Approval, R, is_within
from fp8watch.controller.stores.redis import RedisStore, Write
from fp8watch.records import Command, LedgerUpdate, Reply, RunRecord, StepFrame, Stored

COMMANDS_KEPT = 10_000
"""Number of commands and ledger updates of a run that stay readable for an agent that was disconnected."""
ENDED_SECONDS = 7 * 86_400
"""How long an ended run can be continued with the controller's memory."""
ACK_CHUNK = 512
"""Most entries acknowledged by one command inside the script, well under Lua's limit of some 8,000 arguments."""

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
    """Another controller has claimed the run: this one is no longer active."""


class Interrupted(BaseException):
    """Redis stopped answering while a message was being processed: it has to be processed again.

    Not an `Exception`, so that no handler turns it into "the run is unknown" and starts the run afresh.
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
    """A `Store` whose writes wait for `commit`. Reads go to Redis. It has no frames: the agents write those."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._redis: Any = store.link.client
        self._records: dict[str, list[Stored]] = defaultdict(list)
        self._replies: dict[str, list[Reply]] = defaultdict(list)
        self._numbers: dict[str, int] = {}
        self._sealed: dict[str, _Sealed] = {}
        """Run -> a commit that was sent but not answered: it is sent again unchanged."""
        self.term = 0
        """Term of the lease."""
        self.sent = 0

    # What goes out

    def command(self, run: str, replies: Iterable[Reply]) -> None:
        """Send commands and ledger updates to a run's ranks, with the next commit and not before."""
        self._replies[run] += [reply for reply in replies if isinstance(reply, Command | LedgerUpdate)]

    def is_waiting(self, run: str) -> bool:
        """Whether there is anything to write besides memory and acknowledgements."""
        return bool(self._records.get(run) or self._replies.get(run) or run in self._sealed)

    def is_weighty(self, run: str) -> bool:
        """Whether processing the same entries again would write anything twice. Then memory and acknowledgements must
        be in the same commit. (A `RunRecord` may be written twice.)"""
        return bool(self._replies.get(run)) or any(not isinstance(r, RunRecord) for r in self._records.get(run, ()))

    def claim(self, run: str) -> bool:
        """Bar older terms from writing from now on. Returns False if Redis knew nothing of the run.

        Raises `Fenced` or `redis.RedisError`.
        """
        term, number, own = map(int, self._call(_CLAIM, RunKeys(run), [self.term]))
        sealed = self._sealed.get(run)
        if sealed is not None and (term, number) >= (sealed.term, sealed.number):
            del self._sealed[run]  # the commit had arrived, only its answer had not
        # A run that ended may continue under the same term: keep counting, or new commits would look like repeats.
        is_own = sealed is not None and sealed.term == self.term
        self._numbers[run] = max(own, sealed.number) if is_own and sealed is not None else own
        return term >= 0

    def commit(self, run: str, *, memory: dict[str, bytes], done: list[str]) -> bool:
        """Write everything that waits for a run, together with its memory, and acknowledge the `done` entries.

        Returns False if Redis had lost the data of the run. Raises `Fenced` or `redis.RedisError`; after the latter
        call it again with at least the same entries.
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
        """Send one commit. It stays sealed until it is answered, so that decisions are not made again."""
        sealed = self._sealed.get(run)
        if sealed is None or sealed.term != self.term:
            self._numbers[run] = self._numbers.get(run, -1) + 1
            sealed = self._sealed[run] = _Sealed(self.term, self._numbers[run], writes)
        flat = [argument for write in writes for argument in (len(write), *write)]
        answer = self._call(_COMMIT, RunKeys(run), [sealed.term, sealed.number, *flat])
        del self._sealed[run]
        self.sent += sum(write[0] == "XADD" for write in writes)
        return bool(answer != b"lost")

    def drop(self, run: str) -> None:
        """Discard everything unwritten of one run."""
        for kept in (self._records, self._replies, self._sealed):
            kept.pop(run, None)

    def drop_all(self) -> None:
        """Discard everything unwritten: this controller is no longer active."""
        self._records.clear()
        self._replies.clear()
        self._sealed.clear()
        self._numbers.clear()

    def over(self, run: str) -> None:
        """A run has ended: remove it from the active runs (an agent may add it again) and let the keys that are needed
        only to continue it expire."""
        keys = RunKeys(run)
        self._redis.srem(ACTIVE, run)
        self._redis.expire(keys.frames, int(self._store.keep_seconds))
        for key in (keys.state, keys.ranks, keys.fence, keys.commands):
            self._redis.expire(key, ENDED_SECONDS)

    def revive(self, run: str) -> None:
        """A run continues, perhaps one that had ended or that Redis had lost: undo `over`."""
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
        """As the store's, including records that wait to be written. Raises `Interrupted`."""
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
        """Keep records, except frames, for the next commit."""
        self._records[run] += [record for record in records if not isinstance(record, StepFrame)]

    def read(self, run: str, kind: type[R], first_step: int = 0, last_step: int | None = None) -> Iterator[R]:
        """As the store's, including records that wait to be written: a run that is taken up again must not miss what
        was found in the same round. No frames. Raises `Interrupted`."""
        if kind is StepFrame:
            return iter(())
        try:
            found = list(self._store.read(run, kind, first_step, last_step))
        except (RedisError, OSError) as error:
            raise Interrupted(error) from error
        spots = {key: spot for spot, record in enumerate(found) if (key := key_of(record)) is not None}
        for record in self._records.get(run, ()):
            if not isinstance(record, kind) or not is_within(record, first_step, last_step):
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
        """As the store's."""
        self._store.approve(approval)

    def approvals(self, run: str) -> list[Approval]:
        """As the store's."""
        return self._store.approvals(run)

    def prune(self, run: str) -> int:
        """Does nothing: the agents trim their own frames, by a clock that nobody can set (`fp8watch_agent.trim`)."""
        return 0

    def close(self) -> None:
        """Does nothing: the caller owns the store."""
