"""The part of `fp8watch doctor --cluster` that asks whether what agents send of a run is judged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fp8watch.commands.checks import Check, problem

if TYPE_CHECKING:
    from fp8watch.controller.cluster.redis_link import RedisLink
    from fp8watch.records import NodeFrame, RunRecord

SETTLED_SECONDS = 30.0
"""A frame that is older must have been judged: a controller waits some seconds for a late rank, and a standby some for
the lease."""
WINDOWS_SECONDS = (5.0, 60.0, 600.0)
"""How far back before that a frame is looked for."""
STALE_SECONDS = 60.0
"""A record last written so long before a frame came was not written because of it."""
COUNT = 16


def unjudged(link: RedisLink) -> list[Check]:
    """A problem for each run whose frames arrive and are not judged. Raises `redis.RedisError`."""
    from fp8watch.controller.cluster.redis_keys import ACTIVE
    from fp8watch.controller.stores.redis import RedisStore
    from fp8watch.records import RunRecord

    store, found = RedisStore(link), []
    for name in sorted(link.client.smembers(ACTIVE)):
        run = name.decode(errors="replace")
        newest = _settled_frame(link, run)
        if newest is None:
            continue
        came_unix, frame = newest
        why = _why_not(next(store.read(run, RunRecord), None), frame, came_unix) or _unreadable(link, run, frame)
        if why:
            found.append(problem(f"run {run}", f"node {frame.node} sends frames of it and they are not judged: {why}"))
    return found


def _why_not(record: RunRecord | None, frame: NodeFrame, came_unix: float) -> str:
    if record is None:
        return "no controller knows the run"
    if record.state != "running" and came_unix > record.updated_unix + SETTLED_SECONDS:
        return f"for the controllers it is {record.state} since step {record.last_step}"
    sent, judged = (frame.attempt, frame.step), (record.hello.attempt, record.last_step)
    is_ahead = record.state == "running" and sent > judged
    if is_ahead or came_unix > record.updated_unix + STALE_SECONDS:
        return f"step {sent[1]} of attempt {sent[0]} came, the record is at step {judged[1]} of attempt {judged[0]}"
    return ""


def _unreadable(link: RedisLink, run: str, frame: NodeFrame) -> str:
    """Whether no controller knows which tensors the columns of the frame are of."""
    from fp8watch.controller.cluster.redis_keys import RunKeys

    key = f"{frame.attempt}/{frame.rank}/{frame.layout_id}"
    if not frame.columns or link.client.hmget(RunKeys(run).kind("layout"), [key])[0] is not None:
        return ""
    return "which tensors it reports is not known, only losses and norms are looked at"


def _settled_frame(link: RedisLink, run: str) -> tuple[float, NodeFrame] | None:
    """When it came by Redis' clock (Unix time), and a frame of before `SETTLED_SECONDS`, of a node that is heard."""
    from fp8watch.controller.cluster.redis_keys import RunKeys

    last = float(link.client.time()[0]) - SETTLED_SECONDS
    for seconds in WINDOWS_SECONDS:
        first = max(0, int((last - seconds) * 1000))
        entries = link.client.xrange(RunKeys(run).frames, min=str(first), max=str(int(last * 1000)), count=COUNT)
        for entry_id, fields in reversed(entries):
            frame = _frame(fields)
            if frame is not None and link.client.get(RunKeys(run).contested(frame.node)) is None:
                return int(entry_id.split(b"-")[0]) / 1000, frame
    return None


def _frame(fields: dict[bytes, Any]) -> NodeFrame | None:
    from fp8watch import wire
    from fp8watch.errors import WireError
    from fp8watch.records import NodeFrame
    from fp8watch.security.envelope import unpack

    try:
        message = wire.unpack_uplink(unpack(fields[b"e"]).body) if fields.get(b"k") == b"n" else None
    except (KeyError, WireError):
        return None
    return message if isinstance(message, NodeFrame) else None
