"""A redis-server of a test's own, on a unix socket."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fp8watch.controller.stores.redis import RedisStore

PROGRAM = "/usr/bin/redis-server" if Path("/usr/bin/redis-server").exists() else "redis-server"


@dataclass(frozen=True)
class Server:
    url: str


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Server]:
    # A socket's path ends at 108 bytes, which pytest's own folders may reach.
    with tempfile.TemporaryDirectory(prefix="fp8w-") as short, (folder / "redis.log").open("wb") as log:
        socket = Path(short, "s")
        command = [PROGRAM, "--port", "0", "--unixsocket", str(socket), "--dir", str(folder), "--save", ""]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _await(f"unix://{socket}")
            yield Server(f"unix://{socket}")
        finally:
            process.terminate()
            process.wait(10)


def _await(url: str) -> None:
    deadline = time.monotonic() + 20
    while True:
        with contextlib.suppress(Exception), contextlib.closing(RedisStore(url)) as store:
            if store.link.client.ping():
                return
        assert time.monotonic() < deadline, "redis-server does not answer"
        time.sleep(0.05)
