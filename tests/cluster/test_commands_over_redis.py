"""With FP8WATCH_REDIS_URL the command line sees the cluster's runs, gives verdicts and disarms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import cluster_parts as parts
import pytest
from hand_made import hello
from typer.testing import CliRunner

from fp8watch.cli import build
from fp8watch.controller.cluster.redis_keys import ACTIVE
from fp8watch.controller.cluster.stops import Stops
from fp8watch.records import ActionRecord, Finding, RunRecord

pytestmark = pytest.mark.redis


@pytest.fixture
def redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[parts.Redis]:
    made = parts.Redis(tmp_path / "redis")
    made.start()
    monkeypatch.setenv("FP8WATCH_REDIS_URL", made.url)
    monkeypatch.setenv("FP8WATCH_APPROVAL_KEY", "k" * 32)
    store = made.store()
    store.append(
        "r",
        [
            RunRecord(run="r", state="running", hello=hello("r"), started_unix=1.0, updated_unix=2.0, last_step=7),
            Finding(id="f1", run="r", attempt=0, step=5, onset_step=5, detector="loss_spike", severity="act",
                    cause="data"),
            ActionRecord(id="a1", run="r", attempt=0, action="rewarm", params={}, rule="x", finding="f1",
                         mode="approve", status="waiting", decided_step=5),
        ],
    )  # fmt: skip
    store.close()
    yield made
    made.kill()


def call(*arguments: str) -> str:
    result = CliRunner().invoke(build(), list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_runs_actions_and_verdicts(redis: parts.Redis) -> None:
    (run,) = json.loads(call("runs", "list", "--json"))
    assert (run["run"], run["last_step"]) == ("r", 7)
    assert "secret" not in run["store"]
    shown = json.loads(call("runs", "show", "r", "--json"))
    assert [finding["id"] for finding in shown["findings"]] == ["f1"]
    assert "a1" in call("actions", "list")
    assert "approved" in call("actions", "approve", "a1")
    store = redis.store()
    assert [item.verdict for item in store.approvals("r")] == ["approve"]
    store.close()


def test_disarming_reaches_the_controller(redis: parts.Redis) -> None:
    store = redis.store()
    store.link.client.sadd(ACTIVE, "r", "s")
    stops = Stops(store.link)

    def why(run: str) -> str:
        stops.read({"r", "s"})
        return stops.why(run)

    assert why("r") == ""
    assert "disarmed for the controller" in call("disarm", "r")
    assert "disarmed by" in why("r")
    assert why("s") == ""
    call("disarm", "--all")
    assert "disarmed by fp8watch:disarm" in why("s")
    call("disarm", "r", "--undo")
    call("disarm", "--all", "--undo")
    assert why("r") == why("s") == ""
    store.close()
