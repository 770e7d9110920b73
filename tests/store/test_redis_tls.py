"""Redis over TLS, with certificates of our own: who is trusted is answered, and whoever else is not spoken to."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis as redis_py
import redis_servers

from fp8watch.controller.redis_link import connect, reason_of
from fp8watch.controller.store import Approval
from fp8watch.controller.store_redis import RedisStore
from fp8watch.records import Evaluation

pytestmark = pytest.mark.redis


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=30)


def authority(folder: Path, name: str) -> None:
    openssl(
        folder, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.crt",
    )  # fmt: skip


def certificate(folder: Path, name: str, signer: str, subject: str) -> None:
    """Signed by `signer`; `subject` as in subjectAltName."""
    openssl(
        folder, "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}",
        "-addext", f"subjectAltName={subject}", "-keyout", f"{name}.key", "-out", f"{name}.csr",
    )  # fmt: skip
    openssl(
        folder, "x509", "-req", "-in", f"{name}.csr", "-CA", f"{signer}.crt", "-CAkey", f"{signer}.key",
        "-CAcreateserial", "-days", "2", "-copy_extensions", "copy", "-out", f"{name}.crt",
    )  # fmt: skip


class TlsServer(redis_servers.Server):
    """Speaks TLS only; asks its clients for a certificate of `ours`."""

    def __init__(self, folder: Path, name: str, *, asks_clients: bool) -> None:
        self.port, self.folder = redis_servers.free_port(), folder
        command = [
            redis_servers.SERVER, "--port", "0", "--tls-port", str(self.port), "--bind", "127.0.0.1", "--save", "",
            "--dir", str(folder), "--tls-cert-file", f"{name}.crt", "--tls-key-file", f"{name}.key",
            "--tls-ca-cert-file", "ours.crt", "--tls-auth-clients", "yes" if asks_clients else "no",
            "--loglevel", "warning",
        ]  # fmt: skip
        with (folder / f"log-{self.port}").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        self.client = redis_py.Redis(
            port=self.port, socket_timeout=2, ssl=True, ssl_cert_reqs="none", ssl_check_hostname=False,
            ssl_certfile=str(folder / "agent.crt"), ssl_keyfile=str(folder / "agent.key"),
        )  # fmt: skip
        redis_servers.until(self.client.ping)

    def address(self, **options: str) -> str:
        files = "&".join(f"{name}={self.folder / value}" for name, value in options.items())
        return f"rediss://127.0.0.1:{self.port}/0?{files}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl program to make certificates with")
    # A server stops at the first setting that it does not know: the second where it has TLS.
    known = subprocess.run(
        [redis_servers.SERVER, "--port", "0", "--tls-port", "0", "--no-such-setting", "x"],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    if "no-such-setting" not in known.stdout + known.stderr:
        pytest.skip("this redis-server is built without TLS")
    made = tmp_path_factory.mktemp("tls")
    for name in ("ours", "theirs"):
        authority(made, name)
    certificate(made, "server", "ours", "IP:127.0.0.1")
    certificate(made, "impostor", "theirs", "IP:127.0.0.1")
    certificate(made, "elsewhere", "ours", "DNS:another.example")
    certificate(made, "agent", "ours", "DNS:agent")
    return made


@pytest.fixture
def servers(folder: Path) -> Iterator[list[TlsServer]]:
    started: list[TlsServer] = []
    yield started
    for server in started:
        server.end()


def start(servers: list[TlsServer], folder: Path, name: str, *, asks_clients: bool = False) -> TlsServer:
    servers.append(TlsServer(folder, name, asks_clients=asks_clients))
    return servers[-1]


def refusal(address: str) -> redis_py.RedisError:
    link = connect(address)
    with pytest.raises(redis_py.RedisError) as raised:
        link.client.ping()
    link.close()
    return raised.value


def test_a_store_works_over_tls(servers: list[TlsServer], folder: Path) -> None:
    server = start(servers, folder, "server")
    store = RedisStore(server.address(ssl_ca_certs="ours.crt"))
    store.append("r", [Evaluation(run="r", attempt=0, step=5, scores={"task": 0.5})])
    store.approve(Approval(run="r", action_id="a", verdict="approve"))
    assert [item.step for item in store.read("r", Evaluation)] == [5]
    assert [item.action_id for item in store.approvals("r")] == ["a"]
    store.close()
    refused = refusal(f"redis://127.0.0.1:{server.port}/0")
    assert reason_of(refused) in ("away", "timeout"), "without TLS nothing is answered"


@pytest.mark.parametrize(
    ("name", "trusts", "why"),
    [("impostor", "ours.crt", "verify failed"), ("server", "theirs.crt", "verify failed"),
     ("elsewhere", "ours.crt", "IP address mismatch")],
)  # fmt: skip
def test_a_server_that_is_not_the_one_meant_is_not_spoken_to(
    servers: list[TlsServer], folder: Path, name: str, trusts: str, why: str
) -> None:
    server = start(servers, folder, name)
    refused = refusal(server.address(ssl_ca_certs=trusts))
    assert why in str(refused)
    assert reason_of(refused) == "away"
    assert int(server.client.info("stats")["total_commands_processed"]) < 50
    assert server.client.dbsize() == 0


def test_a_server_may_ask_for_the_clients_certificate(servers: list[TlsServer], folder: Path) -> None:
    server = start(servers, folder, "server", asks_clients=True)
    refusal(server.address(ssl_ca_certs="ours.crt"))
    link = connect(server.address(ssl_ca_certs="ours.crt", ssl_certfile="agent.crt", ssl_keyfile="agent.key"))
    assert link.client.ping()
    link.close()
