"""An incident as a file: it holds what was found and done, and a replay of it finds exactly the same."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import sqlite3
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
from live_run import LiveRun
from test_live_equals_replay import POLICY, record
from typer.testing import CliRunner, Result

from fp8watch import wire
from fp8watch.cli import build
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.policy.load import read
from fp8watch.records import Finding, StepFrame, TraceEntry
from fp8watch.replay.run import replay

APP = build()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the agent leaves it, with one run in it."""
    folder = tmp_path_factory.mktemp("home")
    path = folder / "runs" / "r"
    path.mkdir(parents=True)
    with contextlib.closing(record(path).store):
        return folder


@pytest.fixture(scope="module")
def bundles(home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Detector -> bundle of its incident and the manifest: one of before a restart of the controller, one of after."""
    made = {}
    folder = tmp_path_factory.mktemp("bundles")
    for name, item in incidents(home).items():
        if item["detector"] in {"nonfinite", "grad_spike"}:
            path = folder / f"{name}.zip"
            result = call(home, "incident", "export", name, "-o", str(path), "--json")
            assert result.exit_code == 0, result.output
            made[item["detector"]] = (path, json.loads(result.stdout))
    return made


def call(home: Path, *arguments: str) -> Result:
    return CliRunner().invoke(APP, [*arguments, "--dir", str(home)])


def findings(path: Path) -> list[dict[str, Any]]:
    out, err = io.StringIO(), io.StringIO()
    assert replay([path], out=out, err=err) == 0, err.getvalue()
    return [json.loads(line) for line in out.getvalue().splitlines()]


def incidents(home: Path) -> dict[str, dict[str, Any]]:
    listed = json.loads(call(home, "incident", "list", "--json").stdout)
    return {item["incident"]: item for item in listed}


def test_a_bundle_replays_to_the_findings_of_the_run(
    home: Path, bundles: dict[str, tuple[Path, dict[str, Any]]]
) -> None:
    with contextlib.closing(SqliteStore(home / "runs" / "r" / "store.sqlite", read_only=True)) as store:
        recorded = list(store.read("r", Finding))
    assert bundles["grad_spike"][1]["incident"].startswith("1-"), "of after the controller's restart"
    for path, manifest in bundles.values():
        assert manifest["reproduces"] is True
        again = [(x["incident"], x["step"], x["onset_step"], x["detector"], x["evidence"]) for x in findings(path)]
        expected = [
            (x.incident, x.step, x.onset_step, x.detector, json.loads(json.dumps(x.evidence)))
            for x in recorded
            if manifest["first_step"] <= x.step <= manifest["last_step"]
        ]
        assert again
        assert all(item in expected for item in again)
        with zipfile.ZipFile(path) as archive:
            lines = [json.loads(line) for line in archive.read("trace.jsonl").splitlines()]
        own = {x.id for x in recorded if x.incident == manifest["incident"]}
        assert own == {line["finding"] for line in lines if line["event"] == "found"}


def test_what_is_inside(home: Path, tmp_path: Path, bundles: dict[str, tuple[Path, dict[str, Any]]]) -> None:
    path, _ = bundles["nonfinite"]
    with zipfile.ZipFile(path) as archive:
        assert archive.read("policy.yaml").decode() == POLICY
        manifest = json.loads(archive.read("manifest.json"))
        report = archive.read("report.txt").decode()
        (tmp_path / "frames.sqlite").write_bytes(archive.read("frames.sqlite"))
    told = ("rollback", "rank 0", "newest good checkpoint before onset 95", "read back ok", "attempt 1", "policy test")
    assert [word for word in told if word not in report] == []
    with contextlib.closing(SqliteStore(tmp_path / "frames.sqlite", read_only=True)) as store:
        frames = list(store.read("r", StepFrame))
    with contextlib.closing(SqliteStore(home / "runs" / "r" / "store.sqlite", read_only=True)) as store:
        original = {(f.attempt, f.step, f.rank): f for f in store.read("r", StepFrame)}
    assert len(frames) == manifest["frames"] > 200
    kept = (wire.pack(original[f.attempt, f.step, f.rank]) == wire.pack(f) for f in frames)  # NaN is not NaN
    assert all(kept), "at full resolution"
    assert {frame.rank for frame in frames} == {0, 1}


def test_show_tells_the_story_to_a_person(home: Path) -> None:
    name = next(name for name, item in incidents(home).items() if item["detector"] == "grad_spike")
    text = call(home, "incident", "show", name).stdout
    told = (
        "waiting", "approved by mara", "tighten_clip", "read back ok", "no rule has it: bursts: severity is warn",
        "2.0 times the median gradient norm",
    )  # fmt: skip
    assert [word for word in told if word not in text] == []
    shown = json.loads(call(home, "incident", "show", name, "--json").stdout)
    events = [entry["event"] for entry in shown["trace"]]
    assert events[0] == "policy"
    assert next(event for event in events if event not in {"policy", "attempt", "checkpoint"}) == "found"
    assert {"held_back", "waiting", "person", "ordered", "concluded", "outcome"} <= set(events)
    by_action = json.loads(call(home, "incident", "show", shown["actions"][0]["id"], "--json").stdout)
    assert by_action["incident"] == name
    assert call(home, "incident", "show", "i99").exit_code == 3


def test_a_bundle_says_when_it_cannot_reproduce(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pruned" / "runs" / "r"
    folder.mkdir(parents=True)
    (folder / "store.sqlite").write_bytes((home / "runs" / "r" / "store.sqlite").read_bytes())
    with contextlib.closing(sqlite3.connect(folder / "store.sqlite")) as database, database:
        database.execute("DELETE FROM frames WHERE step < 200")  # as retention does with what is old
    name = next(name for name, item in incidents(home).items() if item["detector"] == "grad_spike")
    result = call(tmp_path / "pruned", "incident", "export", name, "-o", str(tmp_path / "b.zip"), "--json")
    assert result.exit_code == 0
    manifest = json.loads(result.stdout)
    assert ("does not find exactly the same" in result.stderr) is (not manifest["reproduces"])
    assert findings(tmp_path / "b.zip"), "it can still be replayed"


def test_an_export_that_is_stopped_leaves_the_bundle_that_was_there(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, link = tmp_path / "kept.zip", tmp_path / "link.zip"
    kept.write_bytes(b"an older bundle")
    link.symlink_to(kept)
    name = next(name for name, item in incidents(home).items() if item["detector"] == "grad_spike")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(zipfile.ZipFile, "write", full)  # the frames, which come last
        result = call(home, "incident", "export", name, "-o", str(link))
    assert result.exit_code == 3
    assert "link.zip cannot be written: No space left on device" in result.stderr
    assert kept.read_bytes() == b"an older bundle"
    assert sorted(tmp_path.iterdir()) == [kept, link]
    assert call(home, "incident", "export", name, "-o", str(link)).exit_code == 0
    assert link.is_symlink()
    assert findings(kept)


def test_a_pipe_is_written_and_not_replaced(home: Path, tmp_path: Path) -> None:
    pipe, name = tmp_path / "pipe", next(iter(incidents(home)))
    os.mkfifo(pipe)
    copy = tmp_path / "copy.zip"
    reader = threading.Thread(target=lambda: copy.write_bytes(pipe.read_bytes()), daemon=True)
    reader.start()
    assert call(home, "incident", "export", name, "-o", str(pipe)).exit_code == 0
    reader.join(timeout=20)
    assert pipe.is_fifo()
    assert zipfile.is_zipfile(copy)


@pytest.mark.parametrize("damage", ["nothing", "cut", "changed", "newer", "foreign"])
def test_a_damaged_bundle_is_refused(
    tmp_path: Path, bundles: dict[str, tuple[Path, dict[str, Any]]], damage: str
) -> None:
    path = tmp_path / "b.zip"
    path.write_bytes(bundles["nonfinite"][0].read_bytes())
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    if damage in {"changed", "newer", "foreign"}:
        with zipfile.ZipFile(path) as archive:
            files = {item: archive.read(item) for item in archive.namelist()}
        if damage == "changed":
            files["samples.json"] += b" "
        if damage == "newer":
            files["manifest.json"] = files["manifest.json"].replace(b'"format": 1', b'"format": 9')
        if damage == "foreign":
            del files["manifest.json"]
        with zipfile.ZipFile(path, "w") as archive:
            for item, data in files.items():
                archive.writestr(item, data)
    out, err = io.StringIO(), io.StringIO()
    code = replay([path], out=out, err=err)
    assert code == (0 if damage == "nothing" else 2)
    assert damage == "nothing" or err.getvalue().startswith(f"{path}:1: ")


def test_a_run_without_a_journal_can_be_shown_and_exported(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    store = SqliteStore(folder / "store.sqlite")
    run = LiveRun(store, read("observe")[0], lambda step, run: {"loss": float("nan")} if step == 80 else {}, ranks=1)
    run.hello()
    run.train(100)
    store.close()
    with contextlib.closing(sqlite3.connect(folder / "store.sqlite")) as database, database:
        database.execute("DELETE FROM records WHERE kind IN ('trace', 'arrival')")
    with contextlib.closing(SqliteStore(folder / "store.sqlite", read_only=True)) as reader:
        assert not list(reader.read("r", TraceEntry))
    assert "none recorded" in call(tmp_path, "incident", "show", "i00001").stdout
    path = tmp_path / "b.zip"
    assert call(tmp_path, "incident", "export", "i00001", "-o", str(path)).exit_code == 0
    assert [(x["step"], x["detector"]) for x in findings(path)] == [(80, "nonfinite")]
