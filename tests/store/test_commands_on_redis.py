"""The command line on a cluster's runs: where it looked, and verdicts that the controller would not count."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fp8watch.cli import build
from fp8watch.controller.stores.redis import RedisStore
from fp8watch.errors import BadInput
from fp8watch.records import ActionRecord, Hello, RunRecord
from fp8watch.security import approvals, load_ring
from fp8watch.settings import from_environment
from fp8watch.transport import endpoint

pytestmark = pytest.mark.redis
APP = build()
KEY = "k" * 40


def call(*arguments: str) -> Result:
    return CliRunner().invoke(APP, list(arguments))


@pytest.fixture
def store(
    empty_redis: Callable[[str], RedisStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RedisStore]:
    for name in ("APPROVAL_KEY", "APPROVAL_KEY_FILE", "ALLOW_UNSIGNED"):
        monkeypatch.delenv(f"FP8WATCH_{name}", raising=False)
    with contextlib.closing(empty_redis("redis")) as opened:
        monkeypatch.setenv("FP8WATCH_REDIS_URL", opened.link.shown)
        monkeypatch.setenv("FP8WATCH_DIR", str(tmp_path))
        yield opened


@pytest.fixture
def waiting(store: RedisStore) -> RedisStore:
    hello = Hello(
        wire_version=1, run="r", attempt=0, rank=0, local_rank=0, world_size=1, pid=1, host="h", time_unix=1.0, step=0
    )
    action = ActionRecord(
        id="r-1.0001", run="r", attempt=0, action="hold_lr", params={}, rule="x", finding="f", incident="i",
        mode="approve", status="waiting", decided_step=5,
    )  # fmt: skip
    store.append("r", [RunRecord(run="r", state="running", hello=hello, started_unix=1.0, updated_unix=2.0), action])
    return store


@pytest.mark.parametrize("verdict", ["approve", "refuse"])
def test_an_unsigned_verdict_on_a_clusters_action_is_refused(waiting: RedisStore, verdict: str) -> None:
    result = call("actions", verdict, "r-1.0001")
    assert isinstance(result.exception, BadInput)  # exit 2 of the program
    for name in ("FP8WATCH_APPROVAL_KEY", "FP8WATCH_APPROVAL_KEY_FILE", "FP8WATCH_ALLOW_UNSIGNED"):
        assert name in str(result.exception)
    assert "approved" not in result.stdout
    assert waiting.approvals("r") == []


def test_a_signed_verdict_is_one_that_the_controller_counts(
    waiting: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8WATCH_APPROVAL_KEY", KEY)
    result = call("actions", "approve", "r-1.0001")
    assert result.exit_code == 0
    assert "approved, signed" in result.stdout
    assert result.stderr == ""
    (given,) = waiting.approvals("r")
    (action,) = waiting.read("r", ActionRecord)
    assert approvals.refusal(given, action, load_ring(from_environment(), "approval")) == ""


def test_where_redis_is_trusted_an_unsigned_verdict_is_given_with_a_warning(
    waiting: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8WATCH_ALLOW_UNSIGNED", "1")
    result = call("actions", "refuse", "r-1.0001")
    assert result.exit_code == 0
    assert f"does not count if the controller at {waiting.link.shown} has" in result.stderr
    assert "refused, unsigned" in result.stdout
    assert [item.verdict for item in waiting.approvals("r")] == ["refuse"]


@pytest.mark.parametrize(
    "command",
    [("runs", "list"), ("runs", "show"), ("runs", "show", "other"), ("incident", "list"), ("actions", "approve", "x")],
)
def test_what_was_not_found_names_redis_and_the_folder(
    store: RedisStore, tmp_path: Path, command: tuple[str, ...]
) -> None:
    result = call(*command)
    assert f"under {tmp_path} or in {store.link.shown}" in result.output


def test_a_nodes_folder_says_in_which_redis_its_records_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FP8WATCH_REDIS_URL", raising=False)
    address = "rediss://redis.example:6379/0"
    place = endpoint.Endpoint(run="r", pid=1, host="h", socket="", metrics_url="", store="", redis=address)
    endpoint.write(tmp_path, place)
    result = call("runs", "list", "--dir", str(tmp_path))
    assert f"whose records are in {address}: set FP8WATCH_REDIS_URL" in result.stdout


@pytest.mark.parametrize(
    "command",
    [("actions", "list"), ("actions", "list", "r"), ("actions", "approve", "r-1.0001"), ("actions", "refuse", "x"),
     ("runs", "list"), ("runs", "show", "r"), ("incident", "list"), ("disarm",)],
)  # fmt: skip
def test_a_shell_without_the_clusters_address_is_told_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.delenv("FP8WATCH_REDIS_URL", raising=False)
    result = call(*command, "--dir", str(tmp_path))
    assert result.exit_code == (0 if command == ("runs", "list") else 3)
    assert f"under {tmp_path}; for a cluster's runs set FP8WATCH_REDIS_URL" in result.output


def test_a_run_is_shown_with_the_address_of_its_redis(waiting: RedisStore) -> None:
    (listed,) = json.loads(call("runs", "list", "--json").stdout)
    assert listed["store"] == waiting.link.shown
    assert json.loads(call("runs", "show", "r", "--json").stdout)["store"] == waiting.link.shown


@pytest.mark.parametrize(
    ("command", "is_named"),
    [
        (("runs", "list"), True), (("runs", "show"), True), (("actions", "list"), True), (("actions", "approve"), True),
        (("incident", "list"), True), (("incident", "show"), True), (("disarm",), True), (("doctor",), True),
        (("runs", "release"), False), (("console",), False),
    ],
)  # fmt: skip
def test_help_names_the_variable_where_redis_is_looked_into(command: tuple[str, ...], is_named: bool) -> None:
    assert ("FP8WATCH_REDIS_URL" in call(*command, "--help").stdout) == is_named
