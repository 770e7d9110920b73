"""Runs by their names: those under `FP8WATCH_DIR` and, where `FP8WATCH_REDIS_URL` is set, the cluster's."""

from __future__ import annotations

from fp8watch.replay.readers import cluster, store
from fp8watch.replay.recording import Recording


def read(name: str) -> list[Recording]:
    """The newest run of this name; empty when there is none. Raises `Unreachable` if a Redis does not answer."""
    from fp8watch.commands import stores

    for found in reversed(stores.known(stores.folder(None))):
        if found.record.run == name:
            recordings = cluster.read(found.redis_url) if found.redis_url else store.read(found.path)
            return [item for item in recordings if item.run == name]
    return []


def looked() -> str:
    """Where runs were looked for."""
    from fp8watch.commands import stores

    return stores.looked(stores.folder(None))
