"""Certificates that have ended, have not begun or will soon end: served, said, and taken up when they are renewed."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import hand_made as make
import pytest
import tls_servers
from typer.testing import CliRunner

from fp8watch.cli import build
from fp8watch.security import renewal, validity
from fp8watch.security.metrics_access import MetricsAccess
from fp8watch.security.renewal import Renewal
from fp8watch.settings import Settings
from fp8watch_agent.exporter import Exporter
from fp8watch_agent.metrics_state import MetricsState

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl program to make certificates with")
NOW = datetime.now(UTC)
DATES = {
    "good": (-timedelta(days=30), timedelta(days=60)),
    "expired": (-timedelta(days=90), -timedelta(days=1)),
    "future": (timedelta(days=1), timedelta(days=90)),
    "ending": (-timedelta(days=80), timedelta(days=10)),
    # Of one that lives for a day nobody is told two weeks before.
    "short": (-timedelta(hours=2), timedelta(hours=22)),
}
SAID = {
    "good": "", "expired": "the certificate has expired on", "future": "the certificate is not valid before",
    "ending": "the certificate expires on", "short": "",
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dated")
    for name in ("ours", "theirs"):
        tls_servers.authority(folder, name)
    for name, (begins, ends) in DATES.items():
        tls_servers.dated(folder, name, "ours", begins=NOW + begins, ends=NOW + ends, subject="IP:127.0.0.1")
    return folder


def access(folder: Path, name: str) -> MetricsAccess:
    settings = Settings(metrics_tls_cert=folder / f"{name}.crt", metrics_tls_key=folder / f"{name}.key")
    return MetricsAccess.load(settings)


@contextlib.contextmanager
def exporter(folder: Path, name: str) -> Iterator[Exporter]:
    state = MetricsState(clock=lambda: 0.0)
    state.observe(make.hello("r"))
    served = Exporter(state, access(folder, name))
    served.start("127.0.0.1", 0)
    try:
        yield served
    finally:
        served.stop()


def scrape(url: str, folder: Path, *, verifies: bool = True) -> str:
    context = ssl.create_default_context(cafile=folder / "ours.crt")
    if not verifies:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with urllib.request.urlopen(url, timeout=5, context=context) as answer:
        return answer.read().decode()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", DATES)
def test_what_is_said_when_it_is_served_is_what_a_scraper_then_meets(
    made: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    with exporter(made, name) as served:
        said = warnings(caplog)
        assert [SAID[name] in line and str(made / f"{name}.crt") in line for line in said] == [True] * bool(SAID[name])
        if name in ("expired", "future"):
            with pytest.raises(urllib.error.URLError, match="expired" if name == "expired" else "not yet valid"):
                scrape(served.url, made)
        else:
            assert "fp8watch_run_info" in scrape(served.url, made)
        # As from other exporters: who does not ask for the date is served.
        assert "fp8watch_run_info" in scrape(served.url, made, verifies=False)
        assert warnings(caplog) == said, "once, not at each scrape"


def place(made: Path, name: str, folder: Path) -> None:
    for ending in ("key", "crt"):
        (folder / f"new.{ending}").write_bytes((made / f"{name}.{ending}").read_bytes())
        (folder / f"new.{ending}").rename(folder / f"server.{ending}")


def test_a_renewed_certificate_is_taken_up_and_a_broken_one_is_not(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(renewal, "LOOK_SECONDS", 0.0)
    place(made, "expired", tmp_path)
    with exporter(tmp_path, "server") as served:
        with pytest.raises(urllib.error.URLError, match="expired"):
            scrape(served.url, made)
        place(made, "good", tmp_path)
        assert "fp8watch_run_info" in scrape(served.url, made)
        for content, why in ((made / "short.crt", "no certificate with the key"), (made / "ca.cnf", "no certificate")):
            (tmp_path / "server.crt").write_bytes(content.read_bytes())
            caplog.clear()
            for _ in range(2):
                assert "fp8watch_run_info" in scrape(served.url, made)
            assert [why in line and "from before stays in use" in line for line in warnings(caplog)] == [True]
        (tmp_path / "server.crt").unlink()
        assert "fp8watch_run_info" in scrape(served.url, made)
        place(made, "expired", tmp_path)
        with pytest.raises(urllib.error.URLError, match="expired"):
            scrape(served.url, made)
        assert any("has expired" in line for line in warnings(caplog))


def test_clients_are_asked_for_their_certificate_after_a_renewal_too(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "LOOK_SECONDS", 0.0)
    place(made, "expired", tmp_path)
    (tmp_path / "ca.crt").write_bytes((made / "ours.crt").read_bytes())
    settings = Settings(
        metrics_tls_cert=tmp_path / "server.crt", metrics_tls_key=tmp_path / "server.key",
        metrics_client_ca=tmp_path / "ca.crt",
    )  # fmt: skip
    state = MetricsState(clock=lambda: 0.0)
    state.observe(make.hello("r"))
    served = Exporter(state, MetricsAccess.load(settings))
    served.start("127.0.0.1", 0)
    try:
        place(made, "good", tmp_path)
        context = ssl.create_default_context(cafile=made / "ours.crt")
        for _ in range(2):
            with pytest.raises((urllib.error.URLError, ConnectionError, ssl.SSLError)):
                urllib.request.urlopen(served.url, timeout=5, context=context)
        context.load_cert_chain(made / "short.crt", made / "short.key")
        with urllib.request.urlopen(served.url, timeout=5, context=context) as answer:
            assert b"fp8watch_run_info" in answer.read()
        (tmp_path / "ca.crt").write_bytes((made / "theirs.crt").read_bytes())
        with pytest.raises((urllib.error.URLError, ConnectionError, ssl.SSLError)):
            urllib.request.urlopen(served.url, timeout=5, context=context)
    finally:
        served.stop()


def test_one_that_ends_while_it_is_served_is_said_at_each_stage(
    made: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(renewal, "LOOK_SECONDS", 0.0)
    now = [NOW]
    kept = Renewal(
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), made / "good.crt", made / "good.key",
        clock=lambda: now[0].timestamp(),
    )  # fmt: skip
    stages = []
    for days in (0, 45, 47, 55, 59, 61, 80):
        now[0] = NOW + timedelta(days=days)
        caplog.clear()
        kept.look()
        stages.append((days, warnings(caplog)))
    assert [(days, said[0].split(": ")[1].split(" on ")[0]) for days, said in stages if said] == [
        (47, "the certificate expires"), (61, "the certificate has expired"),
    ]  # fmt: skip


def test_the_authorities_of_chain_and_clients_are_looked_at_too(made: Path, tmp_path: Path) -> None:
    chain = tmp_path / "chain.crt"
    chain.write_bytes((made / "good.crt").read_bytes() + (made / "ours.crt").read_bytes())
    dates = validity.dates(chain, made / "good.key", made / "ours.crt")
    said = dates.faults(time.time() + 3 * 86400)  # `ours` is valid for two days
    assert len(said) == 2
    assert "chain.crt: the certificate of its authority (ours) has expired" in said[0]
    assert "ours.crt: the authority (ours) has expired" in said[1]
    assert dates.faults(time.time()) == []


def test_what_clients_refuse_at_any_time_is_said(made: Path, tmp_path: Path) -> None:
    for name, key in (("server", "made"), ("authority", "ca")):
        tls_servers.openssl(
            tmp_path, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days",
            "30", "-subj", f"/CN={name}", "-addext", "extendedKeyUsage=clientAuth", "-keyout", f"{key}.key", "-out",
            f"{key}.crt",
        )  # fmt: skip
    (said,) = validity.dates(tmp_path / "made.crt", tmp_path / "made.key").faults(time.time())
    assert "clients refuse this certificate, whatever the date" in said
    assert "purpose" in said
    (gone,) = validity.dates(made / "good.crt", made / "good.key", tmp_path / "none.crt").faults(time.time())
    assert "none.crt: its expiry date cannot be read" in gone


def doctor() -> tuple[int, dict[str, tuple[str, str]]]:
    result = CliRunner().invoke(build(), ["doctor", "--no-with-torch", "--json"])
    return result.exit_code, {
        row["name"]: (row["result"], row["detail"]) for row in json.loads(result.stdout) if "certificate" in row["name"]
    }


@pytest.mark.parametrize("what", ["METRICS", "CONSOLE"])
def test_doctor_says_it(made: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    name = f"{what.lower()} certificate"
    assert doctor() == (0, {})
    for which, (result, words) in {"good": ("ok", "valid until"), "expired": ("problem", "has expired")}.items():
        monkeypatch.setenv(f"FP8WATCH_{what}_TLS_CERT", str(made / f"{which}.crt"))
        monkeypatch.setenv(f"FP8WATCH_{what}_TLS_KEY", str(made / f"{which}.key"))
        code, found = doctor()
        assert code == (0 if result == "ok" else 3)
        assert found[name][0] == result
        assert words in found[name][1]


def test_looking_after_it_while_others_read_breaks_no_read(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "LOOK_SECONDS", 0.0)
    place(made, "good", tmp_path)
    failures: list[BaseException] = []
    with exporter(tmp_path, "server") as served:

        def read() -> None:
            try:
                for _ in range(15):
                    assert "fp8watch_run_info" in scrape(served.url, made)
            except BaseException as error:
                failures.append(error)

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        while any(reader.is_alive() for reader in readers):
            place(made, "short", tmp_path)
            place(made, "good", tmp_path)
        for reader in readers:
            reader.join()
    assert failures == []


@pytest.mark.parametrize(("mark", "end"), [(b"\xef\xbb\xbf", b"\n"), (b"", b"\r\n"), (b"\xef\xbb\xbf", b"\r\n")])
def test_files_as_any_editor_saves_them_are_served(made: Path, tmp_path: Path, mark: bytes, end: bytes) -> None:
    for ending in ("key", "crt"):
        (tmp_path / f"e.{ending}").write_bytes(mark + (made / f"good.{ending}").read_bytes().replace(b"\n", end))
    with exporter(tmp_path, "e") as served:
        assert "fp8watch_run_info" in scrape(served.url, made)
    assert validity.dates(tmp_path / "e.crt", tmp_path / "e.key").faults(NOW.timestamp()) == []
