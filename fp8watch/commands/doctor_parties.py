"""What agents and controllers say of themselves in Redis, as far as it can be read. For `fp8watch doctor --cluster`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8watch.controller.cluster.redis_link import RedisLink
    from fp8watch.security.keyring import Purpose

SILENT_SECONDS = 15.0
"""Who is silent for longer is reported, and does not count; both normally report every two seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """An agent or a controller."""

    name: str
    age_seconds: float
    """Since it last reported, by Redis' clock; negative: its own is ahead."""
    about: dict[str, Any] = field(default_factory=dict)
    is_broken: bool = False
    """What it says of itself cannot be read; the rest means nothing then."""

    @property
    def is_alive(self) -> bool:
        """Whether it reported lately."""
        return not self.is_broken and self.age_seconds <= SILENT_SECONDS

    @property
    def tells_keys(self) -> bool:
        """Whether it says which keys it has, which earlier versions do not."""
        return isinstance(self.about.get("keys"), dict)

    @property
    def takes_unsigned(self) -> bool:
        """Whether it was told to believe what is not signed, where it has no key."""
        return self.about.get("is_unsigned_taken") is True

    def keys(self, purpose: Purpose) -> list[str]:
        """Fingerprints of its keys, newest first: it signs with the first, and believes all. Empty: it has none."""
        found = self.about["keys"].get(purpose) if self.tells_keys else None
        return [str(print_) for print_ in found] if isinstance(found, list) else []


def parties(link: RedisLink, key: str) -> list[Party]:
    """All in a hash, by name. Raises `redis.RedisError`."""
    now = float(link.client.time()[0])
    return [_party(name.decode(errors="replace"), body, now) for name, body in sorted(link.client.hgetall(key).items())]


def _party(name: str, body: bytes, now: float) -> Party:
    try:
        about = json.loads(body)
        return Party(name=name, age_seconds=now - float(about["time_unix"]), about=about)
    except (ValueError, KeyError, TypeError):
        return Party(name=name, age_seconds=0.0, is_broken=True)
