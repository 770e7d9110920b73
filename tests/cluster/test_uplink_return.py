"""An agent that could not reach Redis for so long that it counts as gone says again which ranks it has."""

from __future__ import annotations

import time
from pathlib import Path

import cluster_parts as parts
import hand_made as make
import pytest

from fp8watch import wire
from fp8watch.controller.cluster.redis_keys import RunKeys
from fp8watch.controller.cluster.redis_link import connect
from fp8watch.records import Hello, Layout, Uplink
from fp8watch.security.envelope import Sealer, unpack
from fp8watch_agent import uplink
from fp8watch_agent.spool import Spool


def messages(store: parts.RedisStore) -> list[Uplink]:
    entries = store.link.client.xrange(RunKeys("r").frames)
    return [wire.unpack_uplink(unpack(fields[b"e"]).body) for _, fields in entries]


@pytest.mark.redis
@pytest.mark.parametrize(("away_seconds", "is_long"), [(0.0, False), (0.8, True)])
def test_ranks_are_announced_again_after_what_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away_seconds: float, is_long: bool
) -> None:
    monkeypatch.setattr(uplink, "PRESENCE_TTL_MS", 1000 if is_long else 60_000)
    server = parts.Redis(tmp_path / "redis", ("--appendfsync", "always"))
    server.start()
    link = connect(server.url, call_seconds=1.0, retries=0)
    spool = Spool(tmp_path / "spool", 10**7)
    thread = uplink.UplinkThread(link, node="n", sealer=Sealer("n", 1, None), spool=spool, keep_seconds=600.0)
    thread.start()
    try:
        for rank in range(2):
            thread.send(make.hello("r", rank=rank, world_size=2))
        thread.send(make.layout("r"))
        parts.wait_for(lambda: thread.sent == 3, what="hellos and layout")
        server.kill()
        thread.send(make.goodbye("r", rank=1))
        parts.wait_for(lambda: thread.is_away, what="Redis seen to be away")
        time.sleep(away_seconds)
        server.start()
        parts.wait_for(lambda: not thread.is_away and spool.is_empty, what="the way back")
        store = server.store()
        parts.wait_for(lambda: len(messages(store)) >= (6 if is_long else 4), what="all that is to be said")
        time.sleep(0.5)  # and nothing more
        found = messages(store)
        store.close()
    finally:
        thread.stop()
        server.kill()
    again = [type(message) for message in found[4:]]
    assert again == ([Hello, Layout] if is_long else []), "the rank that is still there, after what waited"
    assert [message.rank for message in found if isinstance(message, Hello)] == ([0, 1, 0] if is_long else [0, 1])
