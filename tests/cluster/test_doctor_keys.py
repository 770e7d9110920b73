"""`fp8watch doctor --cluster` about keys, standbys and stops: by real processes, and in every way that keys differ."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import cluster_parts as parts
import pytest
from cluster_parts import Cluster, cluster, wait_for
from typer.testing import CliRunner

from fp8watch.cli import build
from fp8watch.commands import doctor_keys
from fp8watch.commands.doctor_parties import Party
from fp8watch.controller.cluster import presence
from fp8watch.controller.cluster.presence import ControllerPresence
from fp8watch.controller.cluster.redis_keys import ACTIVE, CONTROLLERS, DISARM, NODES, RunKeys
from fp8watch.controller.cluster.redis_link import connect
from fp8watch.security import KeyRing
from fp8watch.settings import Settings

OTHER = "z" * 40
Found = dict[str, list[tuple[str, str]]]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    for name in os.environ:
        if name.startswith("FP8WATCH_"):
            monkeypatch.delenv(name)
    with cluster(tmp_path) as running:
        yield running


def doctor(made: Cluster, *options: str) -> tuple[int, Found]:
    """The exit code, and result and words by name; without what concerns the server."""
    result = CliRunner().invoke(build(), ["doctor", "--cluster", "--redis", made.redis.url, "--json", *options])
    found: Found = {}
    for row in json.loads(result.stdout):
        if not row["name"].startswith(("redis", "clock")):
            found.setdefault(row["name"], []).append((row["result"], row["detail"]))
    return result.exit_code, found


def start(made: Cluster, agents: list[str], controllers: list[str]) -> None:
    """Until all have said what they are, and one decides."""
    for node in agents:
        made.agent(node)
    for name in controllers:
        made.controller(name)

    def all_listed() -> bool:
        with contextlib.closing(made.redis.store()) as store:
            client = store.link.client
            said = client.hvals(CONTROLLERS)
            is_led = any(json.loads(body)["is_active"] for body in said)
            return client.hlen(NODES) == len(agents) and len(said) == len(controllers) and is_led

    wait_for(all_listed, what="everybody's word")


def of(found: Found, name: str) -> tuple[str, str]:
    """The only line about an agent or a controller, which has a suffix."""
    ((line,),) = [lines for key, lines in found.items() if key == name or key.startswith(f"{name}-")]
    return line


@pytest.mark.redis
def test_a_sound_cluster_has_nothing_to_be_said_of(made: Cluster) -> None:
    start(made, ["n0"], ["c0", "c1"])
    code, found = doctor(made, "--expect-agents", "1")
    assert code == 0, found
    assert found["keys"] == [("ok", "all fit")]
    assert {result for lines in found.values() for result, _ in lines} == {"ok", "absent"}
    assert [name for name, lines in found.items() if lines[0][0] == "absent"] == ["agent socket"]

    assert made.controllers[1].stop() == 0
    code, found = doctor(made)
    assert code == 0, "one controller works; that nobody stands by is a warning"
    assert of(found, "standby")[0] == "warning"
    assert "start a second" in of(found, "standby")[1]


@pytest.mark.redis
def test_whose_keys_differ_is_named_and_no_key_is_in_redis(made: Cluster) -> None:
    made.own["n1"] = {"FP8WATCH_FRAME_KEY": OTHER}
    made.own["n2"] = {"FP8WATCH_COMMAND_KEY": OTHER}
    made.own["n3"] = {"FP8WATCH_FRAME_KEY": f"{OTHER}\n{parts.KEYS['FP8WATCH_FRAME_KEY']}"}
    made.own["c1"] = {"FP8WATCH_COMMAND_KEY": "y" * 40, "FP8WATCH_APPROVAL_KEY": OTHER}
    start(made, ["n0", "n1", "n2", "n3"], ["c0"])
    made.controller("c1")
    wait_for(lambda: len([name for name in doctor(made)[1] if name.startswith("controller c")]) == 2, what="c1")
    code, found = doctor(made, "--expect-agents", "4")
    assert code == 3
    assert of(found, "agent n0")[0] == "ok"
    for node, variable, effect in (
        ("n1", "FP8WATCH_FRAME_KEY", "is refused"),
        ("n2", "FP8WATCH_COMMAND_KEY", "passes no command on"),
        ("n3", "FP8WATCH_FRAME_KEY", "is refused"),
    ):
        result, words = of(found, f"agent {node}")
        assert result == "problem"
        assert variable in words
        assert effect in words
    (second,) = [lines for name, lines in found.items() if name.startswith("controller c1-")]
    assert {result for result, _ in second} == {"problem"}
    said = " ".join(words for _, words in second)
    assert "FP8WATCH_COMMAND_KEY than the agents n0, n1, n2, n3" in said
    assert "FP8WATCH_APPROVAL_KEY than c0" in said
    with contextlib.closing(made.redis.store()) as store:
        everything = b"".join(body for key in (NODES, CONTROLLERS) for body in store.link.client.hvals(key))
    for secret in (*parts.KEYS.values(), OTHER, "y" * 40):
        assert secret.encode() not in everything


@pytest.mark.redis
def test_without_keys_it_only_observes_and_that_is_said(made: Cluster) -> None:
    made.environment = {}
    start(made, ["n0"], ["c0", "c1"])
    code, found = doctor(made)
    assert code == 3
    result, words = of(found, "controller c0")
    assert result == "problem"
    assert "FP8WATCH_COMMAND_KEY, FP8WATCH_FRAME_KEY, FP8WATCH_APPROVAL_KEY" in words
    assert "only observes" in words
    assert "passes no command on" in of(found, "agent n0")[1]


@pytest.mark.redis
def test_what_is_meant_so_is_no_problem(made: Cluster) -> None:
    made.environment = {"FP8WATCH_ALLOW_UNSIGNED": "1"}
    start(made, ["n0"], ["c0", "c1"])
    with contextlib.closing(made.redis.store()) as store:
        store.link.client.set(DISARM, "1")
        store.link.client.sadd(ACTIVE, "r", "s")
        store.link.client.set(RunKeys("s").disarm, "1")
    code, found = doctor(made)
    assert code == 0, found
    assert "FP8WATCH_ALLOW_UNSIGNED" in of(found, "controller c0")[1]
    assert of(found, "agent n0")[0] == "ok"
    assert found["disarmed"][0][0] == found["run s"][0][0] == "warning"
    assert "disarm --all --undo" in found["disarmed"][0][1]
    assert "disarm s --undo" in found["run s"][0][1]
    assert "run r" not in found


@pytest.mark.redis
def test_the_socket_of_a_killed_agent_is_named(made: Cluster) -> None:
    start(made, ["n0"], ["c0", "c1"])
    socket = ("--agent-socket", f"unix://{made.socket('n0')}")
    assert doctor(made, *socket)[1]["agent socket"][0][0] == "ok"
    made.agents["n0"].kill()
    code, found = doctor(made, *socket)
    assert code == 3
    assert found["agent socket"][0][0] == "problem"
    assert "nobody listens" in found["agent socket"][0][1]


@pytest.mark.redis
def test_a_controller_is_listed_only_while_it_is_there(made: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.closing(made.redis.store()) as store:
        client = store.link.client
        for name, age in {"dead": presence.FORGET_SECONDS + 60, "silent": 60.0}.items():
            client.hset(CONTROLLERS, name, json.dumps({"time_unix": time.time() - age}))
        thread = ControllerPresence(lambda: connect(made.redis.url), "c-1", lambda: True, {"max_mode": "auto"})
        thread.start()
        wait_for(lambda: sorted(client.hkeys(CONTROLLERS)) == [b"c-1", b"silent"])
        found = doctor(made)[1]
        ((result, said),) = found["controller silent"]
        assert result == "absent"
        assert re.fullmatch(r"silent for (59|6\d) s \(limit 15\)", said)
        assert found["controller"][0][0] == "problem", "it holds no lease"
        thread.stop()
        assert client.hkeys(CONTROLLERS) == [b"silent"]

        client.execute_command("ACL", "SETUSER", "old", "on", ">p", "allkeys", "+@all", "-hset")
        denied = ControllerPresence(lambda: connect(f"unix://old:p@{made.redis.path}"), "c-2", lambda: True, {})
        denied.start()
        wait_for(lambda: "will not see this controller" in caplog.text)
        denied.stop()
        assert [record.levelname for record in caplog.records if "will not see" in record.message] == ["WARNING"]


def party(name: str, *, active: bool = False, **keys: str) -> Party:
    """Keys by purpose: one letter a key, newest first."""
    about = {
        "keys": {purpose: list(letters) for purpose, letters in keys.items()}, "is_active": active, "max_mode": "auto",
    }  # fmt: skip
    return Party(name=name, age_seconds=0.0, about=about)


FULL = {"command": "k", "frame": "f", "approval": "p"}


def agent(name: str, **keys: str) -> Party:
    return party(name, **({"command": "k", "frame": "f"} | keys))


def controller(name: str, *, active: bool = False, **keys: str) -> Party:
    return party(name, active=active, **(FULL | keys))


@pytest.mark.parametrize(
    ("agents", "controllers", "named"),
    [
        ([agent("n0"), agent("n1")], [controller("c0", active=True), controller("c1")], set()),
        # A rotation: who verifies has both, who signs has the old one, or the new one already.
        ([agent("n0", command="Kk")], [controller("c0"), controller("c1", command="Kk")], set()),
        ([agent("n0", frame="Ff"), agent("n1")], [controller("c0", frame="Ff")], set()),
        # The new key where nobody who verifies has it.
        ([agent("n0", frame="Ff"), agent("n1")], [controller("c0")], {"agent n0"}),
        ([agent("n0"), agent("n1")], [controller("c0", command="Kk"), controller("c1")], {"controller c0"}),
        ([agent("n0"), agent("n1", command="x")], [controller("c0"), controller("c1")], {"agent n1"}),
        ([agent("n0", command="x")], [controller("c0")], {"agent n0"}),
        ([agent("n0"), agent("n1")], [controller("c0", frame="x")], {"controller c0"}),
        ([agent("n0")], [controller("c0"), controller("c1", frame="x")], {"controller c1"}),
        ([agent("n0", frame="")], [controller("c0")], {"agent n0"}),
        ([agent("n0", command="")], [controller("c0")], {"agent n0"}),
        ([agent("n0", frame=""), agent("n1", frame="")], [controller("c0", frame="")], set()),
        ([], [controller("c0", active=True), controller("c1", approval="x")], {"controller c1"}),
        ([], [controller("c0", active=True), controller("c1", command="x")], {"controller c1"}),
        ([], [controller("c0", active=True, approval="pP"), controller("c1", approval="P")], set()),
        # An earlier version says nothing of its keys.
        ([Party(name="n0", age_seconds=0.0, about={})], [controller("c0")], set()),
        ([Party(name="n0", age_seconds=60.0, about=agent("n0", frame="x").about)], [controller("c0")], set()),
    ],
)  # fmt: skip
def test_who_stands_alone_is_named(agents: list[Party], controllers: list[Party], named: set[str]) -> None:
    found = doctor_keys.checks(Settings(), agents, controllers)
    assert {check.name for check in found if check.result == "problem"} == named


@pytest.mark.parametrize(
    ("own", "name"),
    [({"approval_key": OTHER}, "approval key"), ({"command_key": OTHER}, "command key"), ({"frame_key": "short"}, "")],
)
def test_the_keys_of_this_shell_are_compared_too(own: dict[str, str], name: str) -> None:
    rings = {purpose: KeyRing(purpose, (b"k" * 40,)).fingerprints for purpose in ("command", "frame", "approval")}
    known = Party(name="c0", age_seconds=0.0, about={"keys": rings, "max_mode": "auto"})
    found = doctor_keys.checks(Settings(**own), [], [known])
    assert [check.name for check in found if check.result == "problem"] == ([name] if name else [])
    fits = doctor_keys.checks(Settings(**dict.fromkeys(own, "k" * 40)), [], [known])
    assert [check.result for check in fits] == ["ok"]


def test_a_key_of_this_shell_that_is_none_is_named() -> None:
    (check,) = doctor_keys.checks(Settings(approval_key="short"), [], [])
    assert (check.name, check.result) == ("approval key", "problem")
    assert "at least 32 characters" in check.detail
