"""A network that can be cut, a disk that is full, a clock that jumps: what kernel and C library can do to a node.

Each says why it cannot be had (`why_no_...`): namespaces and mounts need root, the clock needs libfaketime.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SUBNET = "10.213.94"


def _asked(*command: str) -> str:
    """Why a command does not work; empty when it does."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"


@functools.cache
def why_no_network() -> str:
    """Empty where network namespaces can be made."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "no ip program (iproute2)"
    probe = f"fp8probe{os.getpid()}"
    if problem := _asked("ip", "netns", "add", probe):
        return f"no network namespaces: {problem}"
    veth = _asked("ip", "-n", probe, "link", "add", "v0", "type", "veth", "peer", "name", "v1")
    bridge = _asked("ip", "-n", probe, "link", "add", "b0", "type", "bridge")
    _asked("ip", "netns", "del", probe)
    return f"no virtual network: {veth or bridge}" if veth or bridge else ""


@functools.cache
def why_no_disk() -> str:
    """Empty where a small file system can be mounted."""
    if os.geteuid() != 0:
        return "mounting needs root"
    with tempfile.TemporaryDirectory() as folder:
        problem = _asked("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder)
        if not problem:
            _asked("umount", folder)
    return f"no tmpfs: {problem}" if problem else ""


def faketime() -> str:
    """The library that gives a process another clock; empty: there is none."""
    found = sorted(
        glob.glob("/usr/lib/*/faketime/libfaketimeMT.so.1") + glob.glob("/usr/lib/faketime/libfaketimeMT.so*")
    )
    return found[0] if found else ""


def why_no_clock() -> str:
    """Empty where a process can be given another clock."""
    return "" if faketime() else "no libfaketime"


@dataclass
class Network:
    """Hosts on one bridge, which is a namespace of its own: nothing of it can be reached from outside."""

    hosts: dict[str, str] = field(default_factory=dict)
    """Name -> address."""

    def _name(self, host: str) -> str:
        return f"fp8w{os.getpid()}-{host}"

    @property
    def _switch(self) -> str:
        return self._name("switch")

    def start(self) -> None:
        self._ip("netns", "add", self._switch)
        self._ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        self._ip("-n", self._switch, "link", "set", "bridge", "up")

    def add(self, host: str) -> list[str]:
        """A host; what a command on it begins with."""
        space, port = self._name(host), f"p{len(self.hosts)}"
        self.hosts[host] = f"{SUBNET}.{len(self.hosts) + 1}"
        self._ip("netns", "add", space)
        self._ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        self._ip("-n", self._switch, "link", "set", port, "master", "bridge")
        self._ip("-n", self._switch, "link", "set", port, "up")
        self._ip("-n", space, "address", "add", f"{self.hosts[host]}/24", "dev", "eth0")
        self._ip("-n", space, "link", "set", "lo", "up")
        self._ip("-n", space, "link", "set", "eth0", "up")
        return ["ip", "netns", "exec", space]

    def cut(self, host: str) -> None:
        """Nothing reaches a host any more, and nobody is told."""
        self._ip("-n", self._switch, "link", "set", f"p{list(self.hosts).index(host)}", "down")

    def join(self, host: str) -> None:
        """As it was."""
        self._ip("-n", self._switch, "link", "set", f"p{list(self.hosts).index(host)}", "up")

    def fetch(self, host: str, url: str) -> str:
        """What a host's own loopback answers."""
        code = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=5).read().decode())"
        command = ["ip", "netns", "exec", self._name(host), sys.executable, "-c", code, url]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout

    def end(self) -> None:
        for host in (*self.hosts, "switch"):
            _asked("ip", "netns", "del", self._name(host))

    def _ip(self, *arguments: str) -> None:
        if problem := _asked("ip", *arguments):
            raise OSError(f"ip {' '.join(arguments)}: {problem}")


@contextlib.contextmanager
def network() -> Iterator[Network]:
    made = Network()
    try:
        made.start()
        yield made
    finally:
        made.end()


@contextlib.contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[Path]:
    """A file system of that size on `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    if problem := _asked("mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)):
        raise OSError(problem)
    try:
        yield folder
    finally:
        _asked("umount", "--lazy", str(folder))


def fill(folder: Path) -> None:
    """Leave not one block free."""
    with (folder / "ballast").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def empty(folder: Path) -> None:
    """Take back what `fill` wrote."""
    (folder / "ballast").unlink()


def after(code: str, module: str) -> list[str]:
    """A module as the main program of Python after some code has run in it; as in `cluster_parts.Cluster.module`."""
    return ["-c", f"import runpy; {code}; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"]


@dataclass(frozen=True)
class Clock:
    """The wall clock of processes that were started with `environment`; their monotonic clock is the true one."""

    file: Path

    def set(self, seconds: float) -> None:
        """So much ahead of the true time; negative: behind."""
        partial = self.file.with_suffix(".partial")
        partial.write_text(f"{seconds:+g}\n")
        os.replace(partial, self.file)

    def module(self, name: str) -> list[str]:
        """A module under this clock. (libfaketime's clock_nanosleep fails when it leaves the monotonic clock alone.)"""
        return after("import select, time; time.sleep = lambda s: select.select([], [], [], s)", name)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": faketime(), "FAKETIME_TIMESTAMP_FILE": str(self.file), "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }  # fmt: skip
