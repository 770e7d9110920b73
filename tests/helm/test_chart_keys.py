"""The chart's keys: each container gets its own, as `fp8watch` reads them, and the notes say when there are none."""

from __future__ import annotations

from typing import Any

import helm_python
import pytest
from rendered_chart import CASES, chart, notes, pods, render

from fp8watch.security import PURPOSES, load_ring
from fp8watch.settings import from_environment

SECRET = {"command": "c" * 32, "frame": "f" * 32, "approval.key": "a" * 32}
KEYS = {"existingSecret": "s", "approvalKey": "approval.key"}
WARNING = "ONLY OBSERVES"


def environment(values: dict[str, Any], suffix: str) -> dict[str, str]:
    """What Kubernetes gives the container out of `SECRET`: a key that the secret does not have is an error there."""
    container = pods(render(values))[f"r-fp8watch-{suffix}"]["spec"]["containers"][0]
    references = {item["name"]: item.get("valueFrom", {}).get("secretKeyRef") for item in container["env"]}
    assert {ref["name"] for ref in references.values() if ref} <= {"s"}
    return {name: SECRET[ref["key"]] for name, ref in references.items() if ref}


@pytest.mark.parametrize(("suffix", "given"), [("agent", PURPOSES[:2]), ("controller", PURPOSES)])
def test_a_container_loads_the_keys_of_its_part_and_no_other(
    monkeypatch: pytest.MonkeyPatch, suffix: str, given: tuple[str, ...]
) -> None:
    for purpose in PURPOSES:
        monkeypatch.delenv(f"FP8WATCH_{purpose.upper()}_KEY", raising=False)
        monkeypatch.delenv(f"FP8WATCH_{purpose.upper()}_KEY_FILE", raising=False)
    for name, value in environment({"keys": KEYS}, suffix).items():
        monkeypatch.setenv(name, value)
    settings = from_environment()
    assert [purpose for purpose in PURPOSES if load_ring(settings, purpose) is not None] == list(given)


@pytest.mark.parametrize("case", sorted(CASES))
def test_the_console_and_redis_are_given_no_key(case: str) -> None:
    for name, pod in pods(render({**CASES[case], "keys": KEYS})).items():
        if name.endswith(("-console", "-redis")):
            assert "secretKeyRef" not in str(pod)


def test_without_keys_the_notes_warn_and_name_them_all() -> None:
    said = notes({})
    assert WARNING in said
    assert "controllers have no FP8WATCH_COMMAND_KEY, FP8WATCH_FRAME_KEY, FP8WATCH_APPROVAL_KEY" in said
    assert "agents have no FP8WATCH_COMMAND_KEY, FP8WATCH_FRAME_KEY" in said
    assert "keys.existingSecret" in said


def given_by_hand(*names: str) -> dict[str, Any]:
    return {"extraEnv": [{"name": name, "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}} for name in names]}


FILES = [f"FP8WATCH_{purpose.upper()}_KEY_FILE" for purpose in PURPOSES]


@pytest.mark.parametrize(
    "values",
    [
        {"keys": KEYS},
        {"controller": given_by_hand(*FILES), "agent": given_by_hand(*FILES[:2])},
        {"controller": given_by_hand(*FILES), "agent": {"enabled": False}},
        {"controller": given_by_hand("FP8WATCH_ALLOW_UNSIGNED"), "agent": given_by_hand("FP8WATCH_ALLOW_UNSIGNED")},
        {"controller": {"maxMode": "observe"}},
        {"controller": {"enabled": False}, "redis": {"enabled": False}},
    ],
)
def test_the_notes_do_not_warn_where_nothing_is_missing(values: dict[str, Any]) -> None:
    assert WARNING not in notes(values)


def test_one_key_left_out_is_the_one_that_is_named() -> None:
    said = notes({"controller": given_by_hand(*FILES[:2]), "agent": given_by_hand(*FILES[1:2])})
    assert "controllers have no FP8WATCH_APPROVAL_KEY\n" in said
    assert "agents have no FP8WATCH_COMMAND_KEY\n" in said


def test_a_name_that_no_secret_can_have_is_refused() -> None:
    for name in ("", "a key"):
        with pytest.raises(helm_python.HelmValuesError, match="/keys/frameKey"):
            chart.validate_schema({"keys": {"frameKey": name}})
