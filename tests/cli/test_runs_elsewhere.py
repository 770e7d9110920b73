"""Runs whose records went to the state folder, and a path that is not a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fp8watch.commands import runs, stores
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.transport import places


def test_stores_in_the_state_folder_are_found_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    home = tmp_path / "home"
    home.mkdir()
    path = places.run_folder(places.state_folders(home)[0], "r1") / "store.sqlite"
    path.parent.mkdir(parents=True)
    SqliteStore(path).close()
    assert stores.store_files(home) == [path.resolve()]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("os.access", lambda *_: False)
    assert stores.store_files(home) == [path.resolve()]
    assert capsys.readouterr().err.count(f"went to {places.state_folders(home)[0]}") == 1


def test_release_under_what_is_no_folder_says_so(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    found = CliRunner().invoke(runs.app, ["release", "x", "--dir", str(file)])
    assert found.exit_code == 2
    assert "Not a directory" in found.output
    assert isinstance(found.exception, SystemExit)
