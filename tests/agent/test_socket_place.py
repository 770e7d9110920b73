"""Where a socket is to be: only the socket of an agent that is gone is replaced, and only our own is removed."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fp8watch.errors import EXIT_UNREACHABLE
from fp8watch_agent import server


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "agent.sock"


def _dead_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.fspath(path))


def _file(path: Path) -> None:
    path.write_text("precious")


def _folder(path: Path) -> None:
    path.mkdir()


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _link_to_a_file(path: Path) -> None:
    (path.parent / "file").write_text("precious")
    path.symlink_to(path.parent / "file")


def _link_to_a_dead_socket(path: Path) -> None:
    _dead_socket(path.parent / "other")
    path.symlink_to(path.parent / "other")


def _link_to_nothing(path: Path) -> None:
    path.symlink_to(path.parent / "nothing")


@pytest.mark.parametrize(
    "lay", [_file, _folder, _pipe, _link_to_a_file, _link_to_a_dead_socket, _link_to_nothing]
)  # fmt: skip
def test_what_is_not_a_socket_is_left_as_it_is(place: Path, lay) -> None:
    lay(place)
    before = {path.name: os.lstat(path) for path in place.parent.iterdir()}
    with pytest.raises(OSError, match="only a socket is replaced") as caught:
        server.listen(place)
    assert caught.value.errno == errno.EEXIST
    after = {path.name: os.lstat(path) for path in place.parent.iterdir()}
    assert {name: (s.st_ino, s.st_mode, s.st_size) for name, s in after.items()} == {
        name: (s.st_ino, s.st_mode, s.st_size) for name, s in before.items()
    }


def test_the_socket_of_an_agent_that_is_gone_is_replaced_and_that_of_a_living_one_is_not(place: Path) -> None:
    _dead_socket(place)
    with server.listen(place):
        with pytest.raises(OSError, match="another agent serves") as caught:
            server.listen(place)
        assert caught.value.errno == errno.EADDRINUSE
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(os.fspath(place))


def test_at_its_end_an_agent_removes_its_own_socket_only(place: Path) -> None:
    with server.listen(place):
        own = os.lstat(place)
        place.rename(place.parent / "aside")
        _file(place)
        server.remove_own(place, os.lstat(place))  # as if its inode's number had been given to a file
        assert place.read_text() == "precious"
        place.unlink()
        _dead_socket(place)
        server.remove_own(place, own)
        assert place.exists(), "a successor's"
        place.unlink()
        place.symlink_to(place.parent / "aside")
        server.remove_own(place, own)
        assert place.is_symlink()
        place.unlink()
        server.remove_own(place, own)
        (place.parent / "aside").rename(place)
        server.remove_own(place, own)
        assert not place.exists()


def test_the_agent_says_so_and_ends(place: Path) -> None:
    _file(place)
    command = [sys.executable, "-m", "fp8watch_agent", "--dir", os.fspath(place.parent / "d"), "--metrics-port", "0"]
    done = subprocess.run([*command, "--socket", os.fspath(place)], capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_UNREACHABLE
    assert f"cannot serve {place}" in done.stderr
    assert "only a socket is replaced" in done.stderr
    assert "Traceback" not in done.stderr
    assert place.read_text() == "precious"
