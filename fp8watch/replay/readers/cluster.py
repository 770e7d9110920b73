"""Runs of a cluster, read from its Redis, which is named by a URL. They are re-enacted as far back as its stream of
frames goes (`Settings.redis_keep_seconds`)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from fp8watch.errors import BadInput, Unreachable
from fp8watch.records import RunRecord
from fp8watch.replay.recording import Facts, Recording, Seen

if TYPE_CHECKING:
    from fp8watch.controller.stores.redis import RedisStore

_URL = re.compile(r"(?:redis|rediss|unix|redis\+\w+)://")


def is_url(path: str) -> bool:
    """Whether this names a Redis, not a file."""
    return _URL.match(path) is not None


def without_secrets(url: str) -> str:
    """The address as it may be printed."""
    from fp8watch.controller.cluster.redis_link import shown

    try:
        return shown(url)
    except ValueError:  # not a URL, but it may contain a password
        return f"{url.partition(':')[0]}://..."


def read(url: str) -> list[Recording]:
    """Every run in a Redis. Raises `Unreachable` when it does not answer, `BadInput` when there is none in it,
    `MissingDependency` without its client."""
    with _opened(url) as store:
        runs = store.runs()
    if not runs:
        raise BadInput([f"{without_secrets(url)}:1: redis: no runs in it"])
    return [_recording(url, run) for run in runs]


def _recording(url: str, run: RunRecord) -> Recording:
    facts = Facts(warmup_steps=run.hello.warmup_steps, policy=run.hello.policy)
    return Recording(
        run=run.run, source="fp8watch", samples=iter(()), may_be_filtered=False, facts=facts,
        steps=_steps(url, run.run, facts),
    )  # fmt: skip


def _steps(url: str, run: str, facts: Facts) -> Callable[[], Iterator[Seen]]:
    def steps() -> Iterator[Seen]:
        from fp8watch.replay.reenact import Reenactment, has_journal

        with _opened(url) as store:
            if not has_journal(store, run):
                reason = "the controller that wrote it kept no journal: there is nothing to re-enact"
                raise BadInput([f"{without_secrets(url)}:1: {run}: {reason}"])
            yield from Reenactment(store, run, facts).steps()

    return steps


@contextlib.contextmanager
def _opened(url: str) -> Iterator[RedisStore]:
    from fp8watch.controller.cluster.redis_link import RedisError, words_of
    from fp8watch.controller.stores.redis import RedisStore

    try:
        with contextlib.closing(RedisStore(url)) as store:
            yield store
    except (RedisError, OSError) as error:
        raise Unreachable([f"{without_secrets(url)}:1: redis: {' '.join(words_of(error).split())}"]) from error
