"""The console over https, with certificates of our own, and what may not be served in the clear."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dashboard_runs as runs
import pytest
import tls_servers
from free_ports import free_port
from typer.testing import CliRunner
from websockets.sync.client import connect

from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.errors import BadInput
from fp8watch.records import ActionRecord
from fp8watch.security import KeyRing, approvals
from fp8watch_dashboards.cli import SECRETS, app
from fp8watch_dashboards.listening import Listening, is_loopback

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl program to make certificates with")
KEY = "k" * 40


@dataclass(frozen=True, kw_only=True)
class Served:
    """A console that runs, and the folder of certificates that it has one of."""

    port: int
    pid: int
    home: Path
    certificates: Path
    output: Path

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def trusting(self, authority: str) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.certificates / f"{authority}.crt")

    def environment(self) -> dict[str, str]:
        """That of the server, as the kernel has it."""
        rows = Path(f"/proc/{self.pid}/environ").read_bytes().split(b"\0")
        return dict(row.decode().split("=", 1) for row in rows if row)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    tls_servers.make_certificates(folder)
    tls_servers.protect(folder, "server", "protected")
    return folder


@pytest.fixture(scope="module")
def served(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The console's own command, started with all the keys there are."""
    home = tmp_path_factory.mktemp("home")
    runs.write_healthy(home, steps=20)
    port = free_port()
    output = home / "console.log"
    options = ["--dir", str(home), "--host", "127.0.0.1", "--port", str(port)]
    options += ["--tls-cert", str(certificates / "server.crt"), "--tls-key", str(certificates / "server.key")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment |= dict.fromkeys(SECRETS, KEY)
    with output.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", "from fp8watch_dashboards.cli import app; app()", *options],
            env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    found = Served(port=port, pid=process.pid, home=home, certificates=certificates, output=output)
    try:
        deadline = time.monotonic() + 60
        while "Local URL" not in output.read_text() and "URL:" not in output.read_text():
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.1)
        yield found
    finally:
        process.terminate()
        process.wait(timeout=20)


def test_whoever_trusts_the_authority_gets_the_page_and_its_live_part(served: Served) -> None:
    ours = served.trusting("ours")
    with urllib.request.urlopen(f"{served.url}/_stcore/health", timeout=10, context=ours) as answer:
        assert answer.read() == b"ok"
    with urllib.request.urlopen(served.url, timeout=10, context=ours) as answer:
        assert b"<title>" in answer.read()
    # What the page shows travels over its web socket.
    with connect(f"wss://127.0.0.1:{served.port}/_stcore/stream", ssl=ours, open_timeout=10) as stream:
        cipher = stream.socket.version()  # type: ignore[attr-defined]
    assert cipher in ("TLSv1.2", "TLSv1.3")
    assert f"fp8watch console on {served.url} " in served.output.read_text()


def test_a_certificate_of_another_authority_is_noticed(served: Served) -> None:
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(f"{served.url}/_stcore/health", timeout=10, context=served.trusting("theirs"))


def test_in_the_clear_there_is_no_answer(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as plain:
        plain.sendall(b"GET /_stcore/health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := plain.recv(4096):
                answer += part
    assert b"HTTP" not in answer


def test_the_server_holds_no_key_and_cannot_approve(served: Served) -> None:
    environment = served.environment()
    assert environment["FP8WATCH_DIR"] == str(served.home)
    assert [name for name in environment if name.startswith("FP8WATCH_")] == ["FP8WATCH_DIR"]
    store = served.home / "runs" / "waiting-run" / "store.sqlite"
    runs.write_endpoint(served.home, "waiting-run", store)
    action = ActionRecord(
        id="w1", run="waiting-run", attempt=0, action="repair_scale", params={}, finding="f1", rule="x", mode="approve",
        status="waiting", decided_step=1,
    )  # fmt: skip
    with contextlib.closing(SqliteStore(store)) as db:
        db.append("waiting-run", [runs.record("waiting-run"), action])
    ring = KeyRing("approval", (KEY.encode(),))
    command = [sys.executable, "-m", "fp8watch.cli", "actions", "approve", "w1"]
    counted = {}
    for who, keys in (("console", {}), ("person", {"FP8WATCH_APPROVAL_KEY": KEY})):
        subprocess.run(command, env=environment | keys, check=True, capture_output=True, timeout=60)
        with contextlib.closing(SqliteStore(store)) as db:
            counted[who] = len(approvals.sort(db.approvals("waiting-run"), {"w1": action}, ring, set())[0])
    assert counted == {"console": 0, "person": 1}


def refusal(certificates: Path, **given: object) -> list[str]:
    files = {name: certificates / str(value) for name, value in given.items() if name.startswith("tls")}
    listening = Listening(**{"host": "127.0.0.1", "port": 1, **given, **files})  # type: ignore[arg-type]
    with pytest.raises(BadInput) as refused:
        listening.check()
    return refused.value.problems


def test_what_cannot_be_served_is_refused_before_anything_listens(certificates: Path) -> None:
    assert "--tls-key: a certificate" in refusal(certificates, tls_cert="server.crt")[0]
    assert "--tls-cert: a certificate" in refusal(certificates, tls_key="server.key")[0]
    assert len(refusal(certificates, tls_cert="no.crt", tls_key="no.key")) == 2
    assert "no certificate with the key" in refusal(certificates, tls_cert="server.crt", tls_key="agent.key")[0]
    assert "no certificate with the key" in refusal(certificates, tls_cert="server.csr", tls_key="server.key")[0]
    assert "password" in refusal(certificates, tls_cert="server.crt", tls_key="protected.key")[0]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "", "no-such-host.invalid"])
def test_another_address_than_loopback_needs_tls_or_a_word(certificates: Path, host: str) -> None:
    assert "is not loopback: give --tls-cert" in refusal(certificates, host=host)[0]
    Listening(host=host, port=1, allow_plain=True).check()
    pair = {"tls_cert": certificates / "server.crt", "tls_key": certificates / "server.key"}
    Listening(host=host, port=1, **pair).check()


def test_loopback_is_what_the_kernel_calls_so() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    Listening(host="127.0.0.1", port=1).check()
    assert Listening(host="::1", port=8501).url == "http://[::1]:8501"


def test_the_command_says_what_is_wrong_and_ends_with_2() -> None:
    done = CliRunner().invoke(app, ["--host", "0.0.0.0"])
    assert done.exit_code == 2
    assert done.stderr.startswith("command line:1: --host: 0.0.0.0 is not loopback")


def test_a_certificate_that_browsers_refuse_is_said_and_served(certificates: Path, tmp_path: Path) -> None:
    ended = datetime.now(UTC) - timedelta(hours=1)
    tls_servers.dated(
        certificates, "ended", "ours", begins=ended - timedelta(days=9), ends=ended, subject="IP:127.0.0.1"
    )
    listening = Listening(
        host="127.0.0.1", port=1, tls_cert=certificates / "ended.crt", tls_key=certificates / "ended.key"
    )
    listening.check()
    (said,) = listening.remarks()
    assert said.startswith(f"{certificates / 'ended.crt'}: the certificate has expired on ")
    assert Listening(host="127.0.0.1", port=1).remarks() == []
    options = ["--dir", str(tmp_path), "--host", "127.0.0.1", "--port", str(free_port())]
    options += ["--tls-cert", str(listening.tls_cert), "--tls-key", str(listening.tls_key)]
    # All up to the start of the server, in whose place a program that does nothing is put.
    program = "import os, sys; os.execve = lambda *a: sys.exit(7); from fp8watch_dashboards.cli import app; app()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", program, *options], env=environment, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    assert f"warning: {said}" in done.stderr
