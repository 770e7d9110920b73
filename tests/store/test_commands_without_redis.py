"""Every command that looks into Redis, while it does not answer: exit code 3, and one line that says so."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from free_ports import free_port
from typer.testing import CliRunner

from fp8watch.cli import build
from fp8watch.commands import stores
from fp8watch.controller.markers import why_disarmed
from fp8watch.controller.stores.redis import RedisStore
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.records import Hello, RunRecord


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Address of a server that is not there, as it may be printed."""
    port = free_port()
    monkeypatch.setenv("FP8WATCH_REDIS_URL", f"redis://someone:secret@127.0.0.1:{port}/0")
    monkeypatch.setenv("FP8WATCH_DIR", str(tmp_path))
    return f"redis://127.0.0.1:{port}/0"


def record(run: str) -> RunRecord:
    hello = Hello(
        wire_version=1, run=run, attempt=0, rank=0, local_rank=0, world_size=1, pid=1, host="h", time_unix=1.0, step=0
    )
    return RunRecord(run=run, state="running", hello=hello, started_unix=1.0, updated_unix=2.0)


def with_a_run_in_a_file(folder: Path) -> None:
    path = folder / "runs" / "local" / "store.sqlite"
    path.parent.mkdir(parents=True)
    with contextlib.closing(SqliteStore(path)) as store:
        store.append("local", [record("local")])


COMMANDS = [
    ("runs", "list"), ("runs", "list", "--json"), ("runs", "show"), ("runs", "show", "local"), ("incident", "list"),
    ("incident", "show", "i"), ("incident", "export", "i"), ("actions", "list"), ("actions", "approve", "a"),
    ("actions", "refuse", "a"), ("disarm",),
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("has_files", [False, True])
def test_it_exits_with_3_and_one_line(away: str, tmp_path: Path, command: tuple[str, ...], has_files: bool) -> None:
    if has_files:
        with_a_run_in_a_file(tmp_path)
    result = CliRunner().invoke(build(), list(command))
    assert result.exit_code == 3, result.output
    assert result.stdout == "", "a listing without the cluster's runs looks like one of all"
    (line,) = result.stderr.splitlines()
    assert f"{away} cannot be reached: " in line
    assert "secret" not in result.output


def as_a_program(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fp8watch.cli", *command],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    "command", [("runs", "list"), ("replay", "URL"), ("policy", "compare", "auto", "observe", "URL")]
)
def test_the_program_does_so_too(away: str, command: tuple[str, ...]) -> None:
    result = as_a_program(*(os.environ["FP8WATCH_REDIS_URL"] if word == "URL" else word for word in command))
    assert result.returncode == 3, result.stderr
    assert [away in line for line in result.stderr.splitlines() if not line.startswith("nothing was read")] == [True]
    assert "secret" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    "program", [("controller", "--metrics-port", "0"), ("agent", "--metrics-port", "0", "--socket")]
)
def test_a_cluster_of_which_no_node_answers_ends_a_service_with_3(
    away: str, program: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = os.environ["FP8WATCH_REDIS_URL"].replace("redis://", "redis+cluster://")
    monkeypatch.setenv("FP8WATCH_REDIS_URL", url)
    result = as_a_program(*program, *([str(tmp_path / "a.sock")] if program[-1] == "--socket" else []))
    assert result.returncode == 3, result.stderr
    assert "cannot be reached" in result.stderr
    assert "Traceback" not in result.stderr


def test_without_the_address_the_runs_in_files_are_listed(
    away: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_a_run_in_a_file(tmp_path)
    monkeypatch.delenv("FP8WATCH_REDIS_URL")
    result = CliRunner().invoke(build(), ["runs", "list"])
    assert result.exit_code == 0
    assert "local" in result.stdout


@pytest.mark.parametrize("which", ["--all", "local"])
def test_disarm_stops_what_it_can_reach_and_says_what_it_cannot(away: str, tmp_path: Path, which: str) -> None:
    result = CliRunner().invoke(build(), ["disarm", which])
    assert result.exit_code == 3
    assert why_disarmed(tmp_path, "local"), "the ranks of this folder are told all the same"
    assert "controllers go on" in result.stderr


def test_doctor_shows_all_else_and_names_it(away: str) -> None:
    result = CliRunner().invoke(build(), ["doctor", "--no-with-torch"])
    assert result.exit_code == 3
    assert "python" in result.stdout
    assert f"{away} cannot be reached" in " ".join(result.stdout.split())


@pytest.fixture
def there(
    empty_redis: Callable[[str], RedisStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RedisStore]:
    with contextlib.closing(empty_redis("redis")) as opened:
        monkeypatch.setenv("FP8WATCH_REDIS_URL", opened.link.shown)
        monkeypatch.setenv("FP8WATCH_DIR", str(tmp_path))
        opened.append("r", [record("r")])
        yield opened


@pytest.mark.redis
@pytest.mark.parametrize("command", [("runs", "show", "r"), ("actions", "list", "r"), ("incident", "list", "r")])
def test_a_server_that_goes_away_in_between_is_the_same(
    there: RedisStore, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    find = stores.find

    def then_gone(directory: Path, run: str | None) -> stores.Found:
        found = find(directory, run)
        return stores.Found(record=found.record, path=found.path, redis_url=f"redis://127.0.0.1:{free_port()}/0")

    monkeypatch.setattr(stores, "find", then_gone)
    result = CliRunner().invoke(build(), list(command))
    assert result.exit_code == 3, result.output
    assert "cannot be reached" in result.stderr
