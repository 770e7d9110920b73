"""`fp8watch doctor --cluster`: whether a deployment is sound, and if not, what is wrong with it."""

from __future__ import annotations

import os
import socket
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8watch import __version__
from fp8watch.commands import doctor_controllers, doctor_feeding, doctor_keys, doctor_runs, doctor_stops
from fp8watch.commands.checks import Check, problem, without_contradictions
from fp8watch.commands.doctor_parties import SILENT_SECONDS, Party, parties
from fp8watch.errors import BadInput, MissingDependency
from fp8watch.settings import Settings
from fp8watch.wire import READABLE_VERSIONS

if TYPE_CHECKING:
    from fp8watch.controller.cluster.redis_link import RedisLink

MIN_REDIS = (6, 2)
"""XAUTOCLAIM came with 6.2."""
MAX_SKEW_SECONDS = 5.0
SOCKET_SECONDS = 2.0
GOOD_POLICIES = ("noeviction", "volatile-lru", "volatile-lfu", "volatile-random", "volatile-ttl")
"""Eviction policies under which Redis keeps the decision log."""


def checks(
    settings: Settings, redis_url: str | None, expected_agents: int | None, agent_socket: str | None
) -> list[Check]:
    """All checks. `expected_agents` None: only agents that are already known are checked."""
    url = redis_url or (settings.redis_url.get_secret_value() if settings.redis_url is not None else None)
    found = [_socket(agent_socket or settings.agent)]
    if url is None:
        return [*found, problem("redis", "no address: give --redis or FP8WATCH_REDIS_URL")]
    try:
        from fp8watch.controller.cluster.redis_link import RedisError, connect, reason_of, words_of

        link = connect(url, name="fp8watch-doctor")
    except (BadInput, MissingDependency) as error:
        return [*found, problem("redis", str(error))]
    try:
        began = time.monotonic()
        link.client.ping()
        took = time.monotonic() - began
    except (RedisError, OSError) as error:
        link.close()
        return [*found, problem("redis", f"{link.shown}: {reason_of(error)}: {words_of(error)}")]
    found.append(Check(name="redis", result="ok", detail=f"{link.shown} answers in {took * 1000:.1f} ms"))
    for look in (_version, _role, _persistence, _memory, _skew):
        found.append(_asked(look, link))
    try:
        controllers, agents = doctor_controllers.known(link), _known_agents(link)
        found += doctor_controllers.checks(link, controllers)
        found += _agents(agents, expected_agents)
        found += doctor_keys.checks(settings, agents, controllers)
        found += doctor_stops.checks(link)
        found += doctor_runs.contested(link)
        found += doctor_feeding.unjudged(link)
    except (RedisError, OSError) as error:
        found.append(problem("agents", str(error)))
    link.close()
    return without_contradictions(found)


def _asked(look: Any, link: RedisLink) -> Check:
    from fp8watch.controller.cluster.redis_link import RedisError

    name = look.__name__.strip("_")
    try:
        check: Check = look(link)
    except (RedisError, OSError, KeyError) as error:
        return Check(name=f"redis {name}", result="absent", detail=f"not observable: {error}")
    return check


def _info(link: RedisLink, section: str) -> dict[str, Any]:
    """INFO of one server; in a Redis cluster, of any node."""
    found: dict[str, Any] = link.client.info(section)
    first = next(iter(found.values()), None)
    return first if link.is_cluster and isinstance(first, dict) else found


def _version(link: RedisLink) -> Check:
    text = str(_info(link, "server")["redis_version"])
    version = tuple(int(part) for part in text.split(".")[:2])
    if version < MIN_REDIS:
        return problem("redis version", f"{text}; at least {'.'.join(map(str, MIN_REDIS))} is needed (XAUTOCLAIM)")
    return Check(name="redis version", result="ok", detail=text)


def _role(link: RedisLink) -> Check:
    role = str(_info(link, "replication")["role"])
    if role != "master":
        return problem("redis role", f"{role}: read-only; name the master, or use redis+sentinel:// to follow it")
    return Check(name="redis role", result="ok", detail=role)


def _persistence(link: RedisLink) -> Check:
    info = _info(link, "persistence")
    if int(info.get("aof_enabled", 0)):
        if info.get("aof_last_write_status", "ok") != "ok":
            return problem("redis persistence", "the append-only file cannot be written: is the disk full?")
        return Check(name="redis persistence", result="ok", detail="append-only file")
    return problem("redis persistence", "appendonly is off: a restart loses the decision log and the ledger")


def _memory(link: RedisLink) -> Check:
    info = _info(link, "memory")
    policy, limit, used = str(info["maxmemory_policy"]), int(info["maxmemory"]), int(info["used_memory"])
    detail = f"{used / 2**20:.0f} MiB used, " + (f"limit {limit / 2**20:.0f} MiB, {policy}" if limit else "no limit")
    if limit and policy not in GOOD_POLICIES:
        return problem("redis memory", f"{detail}: may evict decisions; set maxmemory-policy noeviction")
    if limit and used > 0.9 * limit:
        return problem("redis memory", f"{detail}: nearly full; frames will go to the agents' disks")
    return Check(name="redis memory", result="ok", detail=detail)


def _skew(link: RedisLink) -> Check:
    before = time.time()
    seconds, micros = link.client.time()
    skew = (seconds + micros / 1e6) - (before + time.time()) / 2
    if abs(skew) > MAX_SKEW_SECONDS:
        return problem("clock", f"Redis is {skew:+.1f} s from this machine: order is kept, times shown are wrong")
    return Check(name="clock", result="ok", detail=f"{skew:+.3f} s from Redis")


def _known_agents(link: RedisLink) -> list[Party]:
    from fp8watch.controller.cluster.redis_keys import NODES

    return parties(link, NODES)


def _agents(agents: list[Party], expected: int | None) -> list[Check]:
    found = [_agent(agent) for agent in agents]
    num_alive = sum(agent.is_alive for agent in agents)
    if expected is not None and num_alive < expected:
        found.append(problem("agents", f"{num_alive} of {expected} expected are heard from"))
    else:
        detail = f"{num_alive} heard from" + (f", {expected} expected" if expected is not None else "")
        found.append(Check(name="agents", result="ok" if num_alive else "absent", detail=detail))
    return found


def _agent(agent: Party) -> Check:
    node, about, age = agent.name, agent.about, agent.age_seconds
    if agent.is_broken:
        return problem(f"agent {node}", "what it says of itself cannot be read")
    detail = f"{about.get('ranks', 0)} ranks, version {about.get('version')}"
    if age > SILENT_SECONDS:
        return Check(name=f"agent {node}", result="absent", detail=f"silent for {age:.0f} s ({detail})")
    if age < -MAX_SKEW_SECONDS:
        return problem(f"agent {node}", f"its clock is {-age:.0f} s ahead of Redis'")
    if about.get("wire_version") not in READABLE_VERSIONS:
        return problem(
            f"agent {node}", f"speaks wire version {about.get('wire_version')}; {__version__} cannot read it"
        )
    if other := about.get("namesake"):
        return problem(
            f"agent {node}",
            f"two agents are alive under this name, one of them {other}: of a run on both only the ranks of one are "
            "watched; give each its own (FP8WATCH_NODE)",
        )
    if about.get("spool_bytes"):
        return problem(f"agent {node}", f"{int(about['spool_bytes']) / 2**20:.1f} MiB wait on its disk")
    if lost := {reason: count for reason, count in (about.get("dropped") or {}).items() if count}:
        return problem(f"agent {node}", "lost for good: " + ", ".join(f"{n} {why}" for why, n in lost.items()))
    return Check(name=f"agent {node}", result="ok", detail=detail)


def _socket(address: str | None) -> Check:
    """The agent's socket on this node, if there is one, and who can connect to it."""
    if address is None:
        return Check(name="agent socket", result="absent", detail="FP8WATCH_AGENT is not set on this machine")
    path = Path(address.removeprefix("unix://"))
    try:
        status, folder = path.stat(), path.parent.stat()
    except OSError as error:
        return problem("agent socket", f"{path}: {error.strerror}: is the agent running here?")
    if not stat.S_ISSOCK(status.st_mode):
        return problem("agent socket", f"{path} is no socket")
    if stat.S_IMODE(folder.st_mode) & 0o002 and not stat.S_IMODE(folder.st_mode) & stat.S_ISVTX:
        return problem("agent socket", f"{path.parent} can be written by everybody: set its mode to 0755 or less")
    if not os.access(path, os.W_OK):
        return problem("agent socket", f"{path}: this user cannot connect; its owner has id {status.st_uid}")
    if why := _deaf(path):
        return problem("agent socket", f"{path}: {why}")
    if stat.S_IMODE(status.st_mode) & 0o022:
        return problem("agent socket", f"{path}: mode {stat.S_IMODE(status.st_mode):04o} lets others connect")
    return Check(name="agent socket", result="ok", detail=f"{path}, mode {stat.S_IMODE(status.st_mode):04o}")


def _deaf(path: Path) -> str:
    """Why nobody takes a connection there; empty: somebody does. A file outlives the agent that was killed."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(SOCKET_SECONDS)
        try:
            client.connect(os.fspath(path))
        except ConnectionRefusedError:
            return "nobody listens: the agent that made it is gone; start it again"
        except (BlockingIOError, TimeoutError):
            return f"the agent takes no connection within {SOCKET_SECONDS:g} s: is it frozen or overloaded?"
        except OSError as error:
            return f"no connection: {error.strerror or error}"
    return ""
