"""Redis servers that all tests of the stores share, emptied before each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis_servers

from fp8watch.controller.stores.redis import RedisStore


@pytest.fixture(scope="session")
def _started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, redis_servers.Server]]:
    servers: dict[str, redis_servers.Server] = {}
    yield servers
    for server in servers.values():
        server.end()


@pytest.fixture
def empty_redis(
    _started: dict[str, redis_servers.Server], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], RedisStore]:
    def open_store(kind: str) -> RedisStore:
        if kind not in _started:
            folder: Path = tmp_path_factory.mktemp(kind)
            make = redis_servers.cluster_of_one if kind == "redis-cluster" else redis_servers.Server
            _started[kind] = make(folder)
        server = _started[kind]
        server.client.flushall()
        url = server.url.replace("redis://", "redis+cluster://").removesuffix("/0")
        return RedisStore(url if kind == "redis-cluster" else server.url)

    return open_store
