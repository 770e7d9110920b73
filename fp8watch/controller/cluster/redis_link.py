"""A connection to Redis in any of its deployment forms, with every timeout and retry set explicitly.

    redis://[user:password@]host:port/db      rediss://... (TLS)      unix:///path/redis.sock
    redis+sentinel://[user:password@]host:port,host:port/service/db   (rediss+sentinel:// with TLS)
    redis+cluster://[user:password@]host:port                         (rediss+cluster:// with TLS)

Query parameters are those of `redis.from_url` (`ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile`); for Sentinel also
`sentinel_username` and `sentinel_password`.

redis-py's defaults change between versions (8.0: a read times out after 5 s and is tried eleven times), so none is
relied on: a call times out after `CALL_SECONDS` and is retried once after a broken connection, and a blocking read
blocks for less than that.
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
"""Longest wait for an answer; after it a server counts as frozen."""
CONNECT_SECONDS = 2.0
BLOCK_MS = 1000
"""Longest blocking read: well under `CALL_SECONDS`."""

RedisError = redis.RedisError
ResponseError = redis.ResponseError
_PLAIN = ("redis", "rediss", "unix")
_SCHEMES = (*_PLAIN, "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")


@dataclass(frozen=True, slots=True)
class RedisLink:
    """A client, the kind of deployment it is connected to, and the address to show (without secrets)."""

    client: Any
    is_cluster: bool
    shown: str

    def reset(self) -> None:
        """Drop all connections, so that the next call looks up the master again."""
        with contextlib.suppress(Exception):
            if self.is_cluster:
                self.client.disconnect_connection_pools()
            else:
                self.client.connection_pool.disconnect()

    def close(self) -> None:
        """Close the client."""
        with contextlib.suppress(Exception):
            self.client.close()


def connect(url: str, *, name: str = "fp8watch", call_seconds: float = CALL_SECONDS, retries: int = 1) -> RedisLink:
    """A client for `url`, which connects at the first call. `retries`: after a broken connection or a timeout.

    Raises `BadInput` for an address of no known form, `RedisError` if no node of a cluster answers.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:  # the address is not shown: it may contain a password
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
    except redis.exceptions.RedisClusterException as error:  # no node answers; the only one that is no `RedisError`
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
    """A label for the error: read_only, out_of_memory, loading, timeout, denied, disk_full, away, other."""
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


def is_about_a_key(error: Exception) -> bool:
    """Whether the server refuses a command for what one of its keys holds: nothing is wrong with the server."""
    return isinstance(error, ResponseError) and str(error).startswith(("WRONGTYPE", "ERR value is not an integer"))


def words_of(error: Exception) -> str:
    """The error as shown to a user: redis-py prints each sentinel with all options of its client, 900 characters."""
    return re.sub(
        r"<redis\.client\.Redis\(.*?\bhost=([^,]+),port=(\d+).*?\)>\)>\)>", r"\1:\2", str(error), flags=re.DOTALL
    )
