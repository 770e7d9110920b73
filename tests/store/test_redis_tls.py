"""Redis over TLS, with certificates of our own: who is trusted is answered, and whoever else is not spoken to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis as redis_py
import tls_servers
from tls_servers import TlsServer

from fp8watch.controller.cluster.redis_link import connect, reason_of
from fp8watch.controller.stores.base import Approval
from fp8watch.controller.stores.redis import RedisStore
from fp8watch.records import Evaluation

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if problem := tls_servers.why_not():
        pytest.skip(problem)
    made = tmp_path_factory.mktemp("tls")
    tls_servers.make_certificates(made)
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
