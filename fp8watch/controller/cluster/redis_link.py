"""A connection to Redis in each of its four forms, with every timeout and retry stated.

    redis://[user:password@]host:port/db      rediss://... (TLS)      unix:///path/redis.sock
    redis+sentinel://[user:password@]host:port,host:port/service/db   (rediss+sentinel:// with TLS)
    redis+cluster://[user:password@]host:port                         (rediss+cluster:// with TLS)

Query parameters are those of `redis.from_url` (`ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile`); for Sentinel also
`sentinel_username` and `sentinel_password`.

redis-py's own defaults change between versions (8.0: a read ends after 5 s and is tried eleven times), so none is
relied on: a call ends after `CALL_SECONDS`, is tried once more after a broken connection, and a blocking read asks
for less than that.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from fp8watch.errors import BadInput, MissingDependency

try:
    import redis
    from redis.backoff import ExponentialWithJitterBackoff
    from redis.retry import Retry
except ImportError as error:
    raise MissingDependency("redis", "controller") from error

CALL_SECONDS = 4.0
"""Longest wait for an answer. A server that is frozen is noticed after it."""
CONNECT_SECONDS = 2.0
BLOCK_MS = 1000
"""Longest blocking read: well under `CALL_SECONDS`."""

RedisError = redis.RedisError
ResponseError = redis.ResponseError
_PLAIN = ("redis", "rediss", "unix")
_SCHEMES = (*_PLAIN, "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")


@dataclass(frozen=True, slots=True)
class RedisLink:
    """A client, what kind of deployment it speaks to, and the address to show (without secrets)."""

    client: Any
    is_cluster: bool
    shown: str

    def reset(self) -> None:
        """Drop all connections, so that the next call asks anew who the master is."""
        with contextlib.suppress(Exception):
            if self.is_cluster:
                self.client.disconnect_connection_pools()
            else:
                self.client.connection_pool.disconnect()

    def close(self) -> None:
        """Let go."""
        with contextlib.suppress(Exception):
            self.client.close()


def connect(url: str, *, name: str = "fp8watch", call_seconds: float = CALL_SECONDS, retries: int = 1) -> RedisLink:
    """A client for `url`; connects at the first call. `retries`: after a broken connection or no answer.

    Raises `BadInput` for an address that is none of the forms, `RedisError` when no node of a cluster answers.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:  # not shown: there may be a password in it
        raise BadInput([f"redis url:1: {error}"]) from error
    if parts.scheme not in _SCHEMES:
        raise BadInput([f"redis url:1: {parts.scheme or url!r}: not one of {', '.join(s + '://' for s in _SCHEMES)}"])
    options: dict[str, Any] = {
        "socket_timeout": call_seconds,
        "socket_connect_timeout": CONNECT_SECONDS,
        "retry": Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), retries=retries),
        "client_name": name,
    }
    try:
        if parts.scheme in _PLAIN:
            if parts.scheme != "unix":
                options |= {"socket_keepalive": True}
            client: Any = redis.Redis.from_url(url, **options)
        elif parts.scheme.endswith("+sentinel"):
            client = _sentinel(url, options)
        else:
            plain = url.replace("+cluster://", "://", 1)
            client = redis.RedisCluster.from_url(plain, **options)
    except (ValueError, TypeError) as error:
        raise BadInput([f"redis url:1: {shown(url)}: {error}"]) from error
    except redis.exceptions.RedisClusterException as error:  # the one that is no `RedisError`: no node answers
        raise redis.ConnectionError(str(error)) from error
    return RedisLink(client=client, is_cluster=parts.scheme.endswith("+cluster"), shown=shown(url))


def shown(url: str) -> str:
    """The address without user, password and parameters."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _sentinel(url: str, options: dict[str, Any]) -> Any:
    parts = urlsplit(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    path = [unquote(part) for part in parts.path.split("/") if part]
    if not path:
        raise ValueError("the name of the service is missing: redis+sentinel://host:port/service")
    extra = dict(parse_qsl(parts.query))
    user, _, password = credentials.partition(":")
    options = {**options, "db": int(path[1]) if len(path) > 1 else 0, "socket_keepalive": True}
    if credentials:
        options |= {"username": unquote(user) or None, "password": unquote(password) or None}
    for_sentinels = {
        "socket_timeout": CONNECT_SECONDS,
        "socket_connect_timeout": CONNECT_SECONDS,
        "username": extra.pop("sentinel_username", None),
        "password": extra.pop("sentinel_password", None),
    }
    tls = {"ssl": True, **{k: v for k, v in extra.items() if k.startswith("ssl_")}} if url.startswith("rediss") else {}
    addresses = []
    for host in hosts.split(","):
        name, _, port = host.rpartition(":")
        addresses.append((name.strip("[]") or host, int(port) if name else 26379))
    sentinel: Any = redis.Sentinel(  # type: ignore[no-untyped-call]
        addresses, sentinel_kwargs=for_sentinels | tls, **options, **tls
    )
    return sentinel.master_for(path[0])


def reason_of(error: Exception) -> str:
    """A label for what went wrong: read_only, out_of_memory, timeout, loading, denied, away, other."""
    text = str(error)
    if isinstance(error, redis.exceptions.ReadOnlyError) or "READONLY" in text:
        return "read_only"
    if isinstance(error, redis.exceptions.OutOfMemoryError) or text.startswith("OOM") or "OOM command" in text:
        return "out_of_memory"
    if isinstance(error, redis.exceptions.BusyLoadingError):
        return "loading"
    if isinstance(error, redis.TimeoutError):
        return "timeout"
    if isinstance(error, redis.exceptions.AuthenticationError | redis.exceptions.NoPermissionError):
        return "denied"
    if "MISCONF" in text:
        return "disk_full"
    return "away" if isinstance(error, redis.ConnectionError | OSError) else "other"


def words_of(error: Exception) -> str:
    """What a person is told of it: redis-py names a sentinel by all options of its client, 900 characters each."""
    return re.sub(
        r"<redis\.client\.Redis\(.*?\bhost=([^,]+),port=(\d+).*?\)>\)>\)>", r"\1:\2", str(error), flags=re.DOTALL
    )
