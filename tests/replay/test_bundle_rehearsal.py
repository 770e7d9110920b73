"""A bundle rehearses as the store that it comes from: with its checkpoints, and with what the run's own policy did."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from live_run import POLICY, LiveRun, Numbers
from typer.testing import CliRunner

from fp8watch.cli import build
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.policy.load import parse
from fp8watch.records import ACTIONS, Hello
from fp8watch.replay.run import replay

BREAKS_AT = 600
LAST_SAVED = 300
"""Before the window, which begins 256 steps before the onset."""
ASKS = POLICY.replace("mode: auto", "mode: approve")
PATIENT = POLICY.replace("mode: auto", "mode: auto\nhealthy_steps: 215")


class SavesEarly(LiveRun):
    """Saves in the first part of the run only."""

    def save(self) -> None:
        if self.step <= LAST_SAVED:
            super().save()


def _numbers(step: int, run: LiveRun) -> dict[str, float]:
    if step in {150, 500}:
        return {"loss": float("nan")}  # other incidents, before the window and in it
    return {"loss": float("nan"), "param_nonfinite": 3.0} if step >= BREAKS_AT else {}


@pytest.fixture(scope="module")
def incident(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The store of a run and the bundle of its last incident."""
    return made(tmp_path_factory.mktemp("home"), _numbers)


def made(home: Path, numbers: Numbers) -> tuple[Path, Path]:
    path = home / "runs" / "r" / "store.sqlite"
    path.parent.mkdir(parents=True)
    with contextlib.closing(SqliteStore(path)) as store:
        run = SavesEarly(store, ASKS, numbers, ranks=1)
        run.hello()
        run.train(BREAKS_AT + 60)
        run.end()
    call = [build(), ["incident", "list", "--json", "--dir", str(home)]]
    name = json.loads(CliRunner().invoke(*call).stdout)[-1]["incident"]
    bundle = home / "b.zip"
    done = CliRunner().invoke(build(), ["incident", "export", name, "-o", str(bundle), "--dir", str(home)])
    assert done.exit_code == 0, done.output
    return path, bundle


def rehearsed(path: Path, policy: str, first: int = 0) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    out, err = io.StringIO(), io.StringIO()
    assert replay([path], parse(policy), out=out, err=err) == 0, err.getvalue()
    rows = [json.loads(line) for line in out.getvalue().splitlines()]
    keys = ("step", "action", "kind", "mode", "params", "rule", "reason", "severity")
    actions = [{key: row[key] for key in keys} for row in rows if "action" in row and row["step"] >= first]
    return actions, rows[-1]["summary"]


def first_step(bundle: Path) -> int:
    with zipfile.ZipFile(bundle) as archive:
        return int(json.loads(archive.read("manifest.json"))["first_step"])


@pytest.mark.parametrize("policy", [ASKS, POLICY, PATIENT], ids=["its own", "other", "patient"])
def test_store_and_bundle_rehearse_alike(incident: tuple[Path, Path], policy: str) -> None:
    store, bundle = incident
    first = first_step(bundle)
    assert first > LAST_SAVED
    of_store, _ = rehearsed(store, policy, first)
    of_bundle, cost = rehearsed(bundle, policy)
    assert of_store
    assert of_bundle == of_store
    assert cost["checkpoints"] == "as recorded"
    assert of_bundle[0]["action"] == "rollback"
    assert of_bundle[0]["kind"] == ("wait" if policy is ASKS else "apply")
    # For the patient one, those of after 284 have the incident of step 500 within their healthy steps.
    assert of_bundle[0]["params"]["checkpoint_step"] == (280 if policy is PATIENT else LAST_SAVED)


def test_what_was_unsound_before_the_window_is_no_target_in_it(tmp_path: Path) -> None:
    def numbers(step: int, run: LiveRun) -> dict[str, float]:
        return {"loss": float("nan")} if step == LAST_SAVED else _numbers(step, run)

    store, bundle = made(tmp_path, numbers)
    of_bundle, _ = rehearsed(bundle, POLICY)
    assert of_bundle == rehearsed(store, POLICY, first_step(bundle))[0]
    assert of_bundle[0]["params"]["checkpoint_step"] < LAST_SAVED


def test_a_bundle_tells_all_decisions_of_its_steps(incident: tuple[Path, Path]) -> None:
    def decided(path: Path) -> list[dict[str, Any]]:
        out = io.StringIO()
        assert replay([path], out=out, err=io.StringIO(), decisions=True) == 0
        rows = [json.loads(line) for line in out.getvalue().splitlines()]
        return [row for row in rows if row["step"] >= first_step(incident[1])]

    lines = decided(incident[1])
    assert len({line["incident"] for line in lines if line["incident"]}) == 2
    assert lines == decided(incident[0])


def test_what_the_run_could_not_do_a_bundle_does_not_propose(
    incident: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs" / "r" / "store.sqlite"
    path.parent.mkdir(parents=True)
    with contextlib.closing(SqliteStore(path)) as store:
        run = SavesEarly(store, ASKS, _numbers, ranks=1)
        receive = run.controller.receive

        def unable(message: Any) -> Any:
            if isinstance(message, Hello):
                able = dict.fromkeys(ACTIONS, "") | {"rollback": "no checkpoints here"}
                message = msgspec.structs.replace(message, capabilities=able)
            return receive(message)

        monkeypatch.setattr(run.controller, "receive", unable)
        run.hello()
        run.train(BREAKS_AT + 10)
        run.end()
    found = json.loads(CliRunner().invoke(build(), ["incident", "list", "--json", "--dir", str(tmp_path)]).stdout)
    bundle = tmp_path / "b.zip"
    name = found[-1]["incident"]
    CliRunner().invoke(build(), ["incident", "export", name, "-o", str(bundle), "--dir", str(tmp_path)])
    actions, _ = rehearsed(bundle, POLICY)
    assert actions == rehearsed(path, POLICY, first_step(bundle))[0]
    assert actions[0]["kind"] == "unavailable"
    assert actions[0]["reason"].endswith("no checkpoints here")


def test_a_bundle_of_an_earlier_version_says_what_was_asked(incident: tuple[Path, Path], tmp_path: Path) -> None:
    """Its steps have neither checkpoints nor lines; the incident's own log was in it."""
    old = tmp_path / "old.zip"
    with zipfile.ZipFile(incident[1]) as archive:
        files = {item: archive.read(item) for item in archive.namelist()}
    window = json.loads(files["samples.json"])
    window = {"rows": [row[:5] for row in window["rows"]], "prefixes": window["prefixes"]}
    files["samples.json"] = json.dumps(window).encode()
    manifest = json.loads(files["manifest.json"])
    manifest["sha256"]["samples.json"] = hashlib.sha256(files["samples.json"]).hexdigest()
    files["manifest.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(old, "w") as archive:
        for item, data in files.items():
            archive.writestr(item, data)
    actions, _ = rehearsed(old, ASKS)
    assert [(row["action"], row["kind"]) for row in actions][:1] == [("rollback", "wait")]
    assert actions == rehearsed(incident[1], ASKS)[0]
    other, cost = rehearsed(old, POLICY)
    assert (other[0]["kind"], cost["checkpoints"]) == ("unavailable", "none")
