"""The part of `fp8watch doctor --cluster` that asks whether the keys of agents, controllers and this shell fit.

No key is seen: each process tells a fingerprint of every key that it has (`fp8watch.security.keyring.shown`). Two keys
fit when the one that signs is among those that the other side believes, as during a rotation.
"""

from __future__ import annotations

from fp8watch.commands.checks import Check, problem, warning
from fp8watch.commands.doctor_parties import Party
from fp8watch.errors import BadInput
from fp8watch.security import PURPOSES, load_ring
from fp8watch.security.keyring import Purpose
from fp8watch.settings import Settings

MOST_NAMES = 8


def checks(settings: Settings, agents: list[Party], controllers: list[Party]) -> list[Check]:
    """A problem for each party whose keys do not fit, and one `ok` where all that can be compared do."""
    agents = [agent for agent in agents if agent.is_alive and agent.tells_keys]
    controllers = [controller for controller in controllers if controller.is_alive and controller.tells_keys]
    found = [*_agents_without(agents, controllers), *_between_controllers(controllers)]
    for purpose in ("frame", "command"):
        found += _apart(purpose, agents, controllers)
    found += _of_this_shell(settings, controllers)
    if found or not controllers:
        return found
    has_all = all(controller.keys(purpose) for controller in controllers for purpose in PURPOSES)
    return [Check(name="keys", result="ok", detail="all fit")] if has_all else []


def _agents_without(agents: list[Party], controllers: list[Party]) -> list[Check]:
    found = []
    is_to_act = not controllers or any(controller.about.get("max_mode") != "observe" for controller in controllers)
    for agent in agents:
        if is_to_act and not agent.keys("command") and not agent.takes_unsigned:
            found.append(problem(f"agent {agent.name}", "has no FP8WATCH_COMMAND_KEY: it passes no command on"))
        if not agent.keys("frame") and (strict := [c.name for c in controllers if c.keys("frame")]):
            why = f"has no FP8WATCH_FRAME_KEY: {_names(strict)} refuse all that it sends"
            found.append(problem(f"agent {agent.name}", why))
        if agent.keys("command") and (mute := [c.name for c in controllers if not c.keys("command")]):
            why = f"has an FP8WATCH_COMMAND_KEY and refuses all commands of {_names(mute)}, which sign nothing"
            found.append(warning(f"agent {agent.name}", why))
    return found


def _fit(purpose: Purpose, agent: Party, controller: Party) -> bool:
    """Agents sign frames, controllers commands."""
    signer, verifier = (agent, controller) if purpose == "frame" else (controller, agent)
    return signer.keys(purpose)[0] in verifier.keys(purpose)


def _apart(purpose: Purpose, agents: list[Party], controllers: list[Party]) -> list[Check]:
    """Where an agent's and a controller's keys are different ones. Who stands alone is named: a controller that fits
    with no agent, if there are several or another controller fits; else the agents."""
    agents = [agent for agent in agents if agent.keys(purpose)]
    controllers = [controller for controller in controllers if controller.keys(purpose)]
    bad = {c.name: [a.name for a in agents if not _fit(purpose, a, c)] for c in controllers}
    variable = f"FP8WATCH_{purpose.upper()}_KEY"
    effect = {"frame": "what they send is refused", "command": "they pass none of its commands on"}[purpose]
    alone = [
        name for name, others in bad.items()
        if others and len(others) == len(agents) and (len(agents) > 1 or not all(bad.values()))
    ]  # fmt: skip
    found = [
        problem(f"controller {name}", f"has another {variable} than the agents {_names(bad[name])}: {effect}")
        for name in alone
    ]
    effect = {"frame": "all that it sends is refused", "command": "it passes no command on"}[purpose]
    for agent in agents:
        strangers = [name for name, others in bad.items() if agent.name in others and name not in alone]
        if strangers:
            why = f"has another {variable} than {_names(strangers)}: {effect}"
            found.append(problem(f"agent {agent.name}", why))
    return found


def _between_controllers(controllers: list[Party]) -> list[Check]:
    """Against the active one: what it remembers is signed with its command key, and people sign with one key."""
    active = next((controller for controller in controllers if controller.about.get("is_active") is True), None)
    found = []
    for other in controllers if active is not None else ():
        assert active is not None
        own, its = other.keys("command"), active.keys("command")
        if own and its and its[0] not in own:
            why = f"has another FP8WATCH_COMMAND_KEY than {active.name}, which decides: it could not go on from there"
            found.append(problem(f"controller {other.name}", why))
        own, its = other.keys("approval"), active.keys("approval")
        if own and its and not set(own) & set(its):
            why = f"has another FP8WATCH_APPROVAL_KEY than {active.name}, which decides: no approval counts at both"
            found.append(problem(f"controller {other.name}", why))
    return found


def _of_this_shell(settings: Settings, controllers: list[Party]) -> list[Check]:
    """What is signed here, or would be believed by training that is started here."""
    found = []
    for purpose, name in (("approval", "approval key"), ("command", "command key")):
        try:
            ring = load_ring(settings, purpose)  # type: ignore[arg-type]
        except BadInput as error:
            found += [problem(name, line) for line in error.problems]
            continue
        if ring is None:
            continue
        for controller in controllers:
            its = controller.keys(purpose)  # type: ignore[arg-type]
            if purpose == "approval" and its and ring.fingerprints[0] not in its:
                why = f"the one set here is not that of {controller.name}: verdicts given here do not count"
                found.append(problem(name, why))
            if purpose == "command" and its and its[0] not in ring.fingerprints:
                why = f"the one set here is not that of {controller.name}: training with it refuses all commands"
                found.append(problem(name, why))
    return found


def _names(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
