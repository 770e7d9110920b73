"""/metrics over TLS, for clients with a certificate, and for those who know the password: real servers and clients."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import hand_made as make
import pytest
import tls_servers

from fp8watch.errors import BadInput
from fp8watch.security import metrics_access
from fp8watch.security.metrics_access import MetricsAccess
from fp8watch.settings import Settings
from fp8watch.transport import Channel
from fp8watch_agent.exporter import Exporter
from fp8watch_agent.metrics_state import MetricsState

HELD_UP_SECONDS = metrics_access.REQUEST_SECONDS - 2
"""Less than somebody takes who is waited for."""
REFUSALS = (urllib.error.URLError, ConnectionError, ssl.SSLError)
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl program to make certificates with")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    tls_servers.make_certificates(folder)
    tls_servers.protect(folder, "server", "protected")
    (folder / "password").write_text("prometheus:open sesame\n")
    (folder / "none").write_text("prometheus\n")
    (folder / "two").write_bytes(b"prometheus:open\rother:sesame\n")
    (folder / "wide").write_bytes("prometheus:open sesame\r\n".encode("utf-16"))
    return folder


@contextlib.contextmanager
def exporter(access: MetricsAccess) -> Iterator[Exporter]:
    state = MetricsState(clock=time.monotonic)
    state.observe(make.hello("r"))
    made = Exporter(state, access)
    made.start("127.0.0.1", 0)
    try:
        yield made
    finally:
        made.stop()


def access(folder: Path, **names: str) -> MetricsAccess:
    return MetricsAccess.load(Settings(**{f"metrics_{key}": folder / name for key, name in names.items()}))


def trusting(folder: Path, authority: str = "ours", own: str = "") -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=folder / f"{authority}.crt")
    if own:
        context.load_cert_chain(folder / f"{own}.crt", folder / f"{own}.key")
    return context


def scrape(url: str, context: ssl.SSLContext | None = None, login: str = "") -> str:
    headers = {"Authorization": "Basic " + base64.b64encode(login.encode()).decode()} if login else {}
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=metrics_access.REQUEST_SECONDS, context=context) as answer:
        return answer.read().decode()


def test_the_certificate_is_verified_and_nothing_is_said_in_the_clear(certificates: Path) -> None:
    with exporter(access(certificates, tls_cert="server.crt", tls_key="server.key")) as served:
        assert served.url.startswith("https://127.0.0.1:")
        assert "fp8watch_run_info" in scrape(served.url, trusting(certificates))
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            scrape(served.url, trusting(certificates, "theirs"))
        with pytest.raises(REFUSALS):
            scrape(served.url.replace("https", "http"))


def test_a_client_that_never_shakes_hands_holds_up_nobody(certificates: Path) -> None:
    with exporter(access(certificates, tls_cert="server.crt", tls_key="server.key")) as served:
        host, port = served.target.split(":")
        silent = [socket.create_connection((host, int(port)), timeout=5) for _ in range(3)]
        began = time.monotonic()
        assert "fp8watch_run_info" in scrape(served.url, trusting(certificates))
        assert time.monotonic() - began < HELD_UP_SECONDS
        for one in silent:
            one.close()


@pytest.mark.parametrize("names", [{}, {"tls_cert": "server.crt", "tls_key": "server.key"}])
def test_many_that_connect_and_never_finish_hold_up_nobody_and_take_no_more_descriptors_than_a_few(
    certificates: Path, names: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_access, "MOST_CONNECTIONS", 3)
    others = set(threading.enumerate())
    with exporter(access(certificates, **names)) as served, contextlib.ExitStack() as stack:
        host, port = served.target.split(":")
        for _ in range(9):
            one = stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
            one.sendall(b"G")
        context = trusting(certificates) if names else None
        began = time.monotonic()
        assert "fp8watch_run_info" in scrape(served.url, context)
        assert time.monotonic() - began < HELD_UP_SECONDS
        while (num := sum("process_request_thread" in thread.name for thread in {*threading.enumerate()} - others)) > 3:
            assert time.monotonic() - began < HELD_UP_SECONDS, f"{num} connections are served"
            time.sleep(0.02)
        assert num > 0, "the newest are let be"


def test_only_certificates_of_our_authority_are_let_in(certificates: Path) -> None:
    names = {"tls_cert": "server.crt", "tls_key": "server.key", "client_ca": "ours.crt"}
    with exporter(access(certificates, **names)) as served:
        assert "fp8watch_run_info" in scrape(served.url, trusting(certificates, own="agent"))
        for own in ("", "impostor"):
            with pytest.raises(REFUSALS):
                scrape(served.url, trusting(certificates, own=own))


def test_the_password_is_asked_for(certificates: Path) -> None:
    with exporter(access(certificates, password_file="password")) as served:
        assert "fp8watch_run_info" in scrape(served.url, login="prometheus:open sesame")
        for login in ("", "prometheus:open", "prometheus:open sesame2", "other:open sesame", ":"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                scrape(served.url, login=login)
            assert refused.value.code == 401
            assert refused.value.headers["WWW-Authenticate"].startswith("Basic ")
            assert b"fp8watch_run" not in refused.value.read()
            refused.value.close()
        request = urllib.request.Request(served.url, headers={"Authorization": "Basic \xff not base64"})
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            urllib.request.urlopen(request, timeout=5)
        refused.value.close()


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"\r\n\r\n"])
def test_how_an_editor_ends_and_marks_the_file_is_no_part_of_the_password(
    tmp_path: Path, mark: bytes, end: bytes
) -> None:
    (tmp_path / "password").write_bytes(mark + b"prometheus:open sesame" + end)
    with exporter(access(tmp_path, password_file="password")) as served:
        assert "fp8watch_run_info" in scrape(served.url, login="prometheus:open sesame")


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ({"tls_cert": "server.crt"}, "FP8WATCH_METRICS_TLS_KEY: certificate and key"),
        ({"tls_key": "server.key"}, "FP8WATCH_METRICS_TLS_CERT: certificate and key"),
        ({"tls_cert": "server.crt", "tls_key": "agent.key"}, "FP8WATCH_METRICS_TLS_CERT: no certificate with the key"),
        (
            {"tls_cert": "missing.crt", "tls_key": "server.key"},
            "missing.crt:1: FP8WATCH_METRICS_TLS_CERT: No such file",
        ),
        ({"tls_cert": "server.crt", "tls_key": "protected.key"}, "FP8WATCH_METRICS_TLS_KEY: it has a password"),
        ({"client_ca": "ours.crt"}, "FP8WATCH_METRICS_CLIENT_CA: needs"),
        ({"password_file": "none"}, "FP8WATCH_METRICS_PASSWORD_FILE: holds no line name:password"),
        ({"password_file": "two"}, "FP8WATCH_METRICS_PASSWORD_FILE: holds no line name:password"),
        ({"password_file": "wide"}, "FP8WATCH_METRICS_PASSWORD_FILE: is UTF-16"),
        ({"password_file": "missing"}, "missing:1: FP8WATCH_METRICS_PASSWORD_FILE: No such file"),
    ],
)
def test_what_cannot_be_served_is_named(certificates: Path, names: dict[str, str], problem: str) -> None:
    with pytest.raises(BadInput) as refused:
        access(certificates, **names)
    assert problem in refused.value.problems[0]


def test_without_settings_nothing_is_asked_for() -> None:
    assert MetricsAccess.load(Settings()) == MetricsAccess()


def test_a_runs_own_agent_is_announced_with_its_scheme_and_loses_no_run_to_a_bad_file(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Path(os.environ["FP8WATCH_DIR"])
    monkeypatch.setenv("FP8WATCH_METRICS_TLS_CERT", str(certificates / "server.crt"))
    monkeypatch.setenv("FP8WATCH_METRICS_TLS_KEY", str(certificates / "server.key"))
    for run, has_metrics in (("seen", True), ("blind", False)):
        channel = Channel(run=run, settings=Settings(dir=home, metrics_port=0))
        channel.set_preamble([make.hello(run), make.layout(run)])
        welcome = make.wait_for(channel.take)[0]
        assert welcome.metrics_url.startswith("https://") is has_metrics
        if has_metrics:
            assert 'run="seen"' in scrape(welcome.metrics_url, trusting(certificates))
            (target,) = json.loads((home / "targets.json").read_text())
            assert target["labels"]["__scheme__"] == "https"
        channel.send(make.goodbye(run, 0))
        channel.close()
        monkeypatch.setenv("FP8WATCH_METRICS_TLS_KEY", str(certificates / "agent.key"))


def test_a_standing_agent_ends_with_2_over_a_bad_file(certificates: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "FP8WATCH_METRICS_PASSWORD_FILE": str(certificates / "none"),
    }  # fmt: skip
    command = [sys.executable, "-m", "fp8watch_agent", "--socket", f"unix://{tmp_path}/s"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, signal.strsignal(-done.returncode) if done.returncode < 0 else done.stderr
    assert "FP8WATCH_METRICS_PASSWORD_FILE: holds no line name:password" in done.stderr
