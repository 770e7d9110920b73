"""The part of `fp8watch doctor --cluster` about controllers: who decides, who stands by, what may be done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8watch.commands.checks import Check, problem, warning
from fp8watch.commands.doctor_parties import SILENT_SECONDS, Party, parties
from fp8watch.security import PURPOSES

if TYPE_CHECKING:
    from fp8watch.controller.cluster.redis_link import RedisLink


def known(link: RedisLink) -> list[Party]:
    """Every controller that says that it is there, or did in the last minutes. Raises `redis.RedisError`."""
    from fp8watch.controller.cluster.redis_keys import CONTROLLERS

    return parties(link, CONTROLLERS)


def checks(link: RedisLink, controllers: list[Party]) -> list[Check]:
    """The lease, the standby and every controller. Raises `redis.RedisError`."""
    alive = [controller for controller in controllers if controller.is_alive]
    return [*_standby(link, alive), *(_controller(controller) for controller in controllers)]


def _standby(link: RedisLink, alive: list[Party]) -> list[Check]:
    from fp8watch.controller.cluster.redis_keys import LEASE

    held = link.client.get(LEASE)
    if held is None:
        return [problem("controller", "none is active: start `fp8watch controller` (two, so that one stands by)")]
    term, _, holder = held.decode(errors="replace").partition(":")
    decides = Check(name="controller", result="ok", detail=f"{holder} decides, term {term}")
    others = [controller.name for controller in alive if controller.name != holder]
    if others:
        return [decides, Check(name="standby", result="ok", detail=f"{', '.join(others)} would take over")]
    if not alive:
        why = (
            "not observable: no controller lists itself (it is older, or lacks rights: apply this version's "
            "docs/redis-acl.conf)"
        )
        return [decides, Check(name="standby", result="absent", detail=why)]
    why = "none: if that controller ends, nobody decides until it is back; start a second `fp8watch controller`"
    return [decides, warning("standby", why)]


def _controller(it: Party) -> Check:
    name, about = f"controller {it.name}", it.about
    if it.is_broken:
        return problem(name, "what it says of itself cannot be read")
    if not it.is_alive:
        return Check(name=name, result="absent", detail=f"silent for {it.age_seconds:.0f} s (limit {SILENT_SECONDS:g})")
    missing = [f"FP8WATCH_{purpose.upper()}_KEY" for purpose in PURPOSES if not it.keys(purpose)]
    if missing and it.takes_unsigned:
        return warning(name, f"has no {', '.join(missing)}: who can write to Redis can act (FP8WATCH_ALLOW_UNSIGNED)")
    if missing and about.get("max_mode") != "observe":
        return problem(name, f"has no {', '.join(missing)}: it only observes, whatever the policies of the runs say")
    state = "active" if about.get("is_active") else "stands by"
    detail = f"{state}, up to mode {about.get('mode')}, version {about.get('version')}"
    return Check(name=name, result="ok", detail=detail)
