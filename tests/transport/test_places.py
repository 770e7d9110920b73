"""Where sockets and run folders lie."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8watch.transport import places


@given(run=st.text(min_size=1, max_size=300))
def test_every_run_name_has_a_folder_right_under_runs(run: str) -> None:
    folder = places.run_folder(Path("/d"), run)
    assert folder.parent == Path("/d/runs")
    assert folder.name not in (".", "..")
    assert "\0" not in folder.name
    assert len(folder.name.encode()) < 200


@given(first=st.text(min_size=1, max_size=40), second=st.text(min_size=1, max_size=40))
def test_two_runs_never_share_a_folder(first: str, second: str) -> None:
    assert (places.run_folder(Path("d"), first) == places.run_folder(Path("d"), second)) == (first == second)


def test_a_plain_name_is_the_folder_itself() -> None:
    assert places.run_folder(Path("d"), "2026-11-30_gpt.v2") == Path("d/runs/2026-11-30_gpt.v2")


def test_socket_is_private_short_and_differs_by_folder_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    paths = {places.socket_path(tmp_path / d, r) for d in ("a", "b") for r in ("run", "run2", "x" * 300, "x" * 299)}
    assert len(paths) == 8
    for path in paths:
        assert len(bytes(path)) <= places.MAX_SOCKET_PATH_BYTES
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_long_runtime_folder_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("long" * 30)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr("tempfile.tempdir", None)
    path = places.socket_path(tmp_path, "run")
    assert len(bytes(path)) <= places.MAX_SOCKET_PATH_BYTES
    assert path.parent.parent == Path("/tmp")


def test_a_symbolic_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError):
        places.private_folder(tmp_path / "link")


def test_an_open_folder_is_closed_to_others(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    places.private_folder(tmp_path / "open")
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == 0o700
