"""Who may read the console and /metrics of a release: what secrets give to programs, and what monitors bring."""

from __future__ import annotations

import base64
import shutil
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import helm_python
import prometheus_client
import pytest
import tls_servers
from rendered_chart import Document, notes, one, pods, render

from fp8watch.security.metrics_access import MetricsAccess
from fp8watch.settings import from_environment

SCRAPED = {"agent": {"metrics": {"scope": "pod"}}, "controller": {"metrics": {"scope": "pod"}}}
TLS = {"existingSecret": "metrics-tls", "serverName": "agent"}
CLIENTS = {"clientCaSecret": "scrapers", "scraperSecret": "prometheus"}
PASSWORD = {"existingSecret": "login"}
Secrets = dict[str, dict[str, bytes]]
"""Name -> key -> contents."""


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    """What the values above speak of. The serving certificate is that of the name `agent`."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl program to make certificates with")
    folder = tmp_path_factory.mktemp("certificates")
    tls_servers.make_certificates(folder)
    tls_servers.certificate(folder, "scraper", "theirs", "DNS:prometheus")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return {
        "metrics-tls": {"tls.crt": files["agent.crt"], "tls.key": files["agent.key"], "ca.crt": files["ours.crt"]},
        "scrapers": {"ca.crt": files["theirs.crt"], "ca.key": files["theirs.key"]},
        "prometheus": {"tls.crt": files["scraper.crt"], "tls.key": files["scraper.key"]},
        "login": {"credentials": b"prometheus:open sesame\n", "username": b"prometheus", "password": b"open sesame"},
    }


def mounted(pod: Document, secrets: Secrets, root: Path) -> dict[str, str]:
    """Do as the kubelet does, below `root`: secrets become files. The container's variables, with paths below it."""
    (container,) = pod["spec"]["containers"]
    volumes = {volume["name"]: volume["secret"] for volume in pod["spec"]["volumes"] if "secret" in volume}
    folders = []
    for mount in container["volumeMounts"]:
        if (volume := volumes.pop(mount["name"], None)) is not None:
            folder = root / mount["mountPath"].lstrip("/")
            folder.mkdir(parents=True)
            folders.append(mount["mountPath"])
            for item in volume["items"]:
                (folder / item["path"]).write_bytes(secrets[volume["secretName"]][item["key"]])
    assert not volumes, "volumes that nothing mounts"
    found = {variable["name"]: variable.get("value", "") for variable in container["env"]}
    return {name: f"{root}{text}" if text.startswith(tuple(folders)) else text for name, text in found.items()}


def endpoint(documents: list[Document], monitor: str, suffix: str) -> Document:
    """The only one of a component's monitor."""
    key = "endpoints" if monitor == "ServiceMonitor" else "podMetricsEndpoints"
    (found,) = one(documents, monitor, suffix)["spec"][key]
    return dict(found)


def scrape(port: int, said: Document, secrets: Secrets, folder: Path) -> str:
    """As the operator's Prometheus does with this endpoint; the pod is reached by its address."""

    def part(at: Document) -> bytes:
        return secrets[at["name"]][at["key"]]

    context = None
    if "tlsConfig" in said:
        tls = said["tlsConfig"]
        context = ssl.create_default_context(cadata=part(tls["ca"]["secret"]).decode())
        if "cert" in tls:
            (folder / "c").write_bytes(part(tls["cert"]["secret"]))
            (folder / "k").write_bytes(part(tls["keySecret"]))
            context.load_cert_chain(folder / "c", folder / "k")
        assert tls["serverName"] == "agent"
        context.check_hostname = False  # urllib cannot be told another name than the address
    request = urllib.request.Request(f"{said.get('scheme', 'http')}://127.0.0.1:{port}/metrics")
    if "basicAuth" in said:
        login = b":".join(part(said["basicAuth"][name]) for name in ("username", "password"))
        request.add_header("Authorization", "Basic " + base64.b64encode(login).decode())
    with urllib.request.urlopen(request, timeout=5, context=context) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize("monitor", ["ServiceMonitor", "PodMonitor"])
@pytest.mark.parametrize("suffix", ["agent", "controller"])
@pytest.mark.parametrize(
    ("values", "strangers"),
    [
        ({}, []),
        ({"metricsTls": TLS}, ["scheme"]),
        ({"metricsPassword": PASSWORD}, ["basicAuth"]),
        ({"metricsTls": TLS | CLIENTS, "metricsPassword": PASSWORD}, ["scheme", "basicAuth", "cert"]),
    ],
    ids=["open", "tls", "password", "everything"],
)
def test_a_monitor_reads_what_is_served_and_nobody_without_what_it_brings(
    monitor: str, suffix: str, values: dict[str, Any], strangers: list[str],
    secrets: Secrets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    documents = render({**SCRAPED, monitor[0].lower() + monitor[1:]: {"enabled": True}, **values})
    given = mounted(pods(documents)[f"r-fp8watch-{suffix}"], secrets, tmp_path / "container")
    for name, text in given.items():
        if name.startswith("FP8WATCH_METRICS"):
            monkeypatch.setenv(name, text)
    access = MetricsAccess.load(from_environment())
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.Gauge("fp8watch_step", "Step.", registry=registry).set(7)
    server, thread = access.serve(registry, "127.0.0.1", 0)
    try:
        said = endpoint(documents, monitor, f"-{suffix}")
        assert "fp8watch_step 7.0" in scrape(server.server_port, said, secrets, tmp_path)
        for left_out in strangers:
            less = {key: value for key, value in said.items() if key != left_out}
            if left_out == "scheme":
                less = {key: value for key, value in less.items() if key != "tlsConfig"}
            elif left_out == "cert":
                less["tlsConfig"] = {key: said["tlsConfig"][key] for key in ("serverName", "ca")}
            with pytest.raises((urllib.error.URLError, ConnectionError, ssl.SSLError)) as refused:
                scrape(server.server_port, less, secrets, tmp_path)
            if isinstance(refused.value, urllib.error.HTTPError):
                assert refused.value.code == 401
                refused.value.close()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_container_is_given_no_key_but_its_own(secrets: Secrets, tmp_path: Path) -> None:
    documents = render({**SCRAPED, "metricsTls": TLS | CLIENTS, "metricsPassword": PASSWORD})
    for suffix in ("agent", "controller"):
        mounted(pods(documents)[f"r-fp8watch-{suffix}"], secrets, tmp_path / suffix)
        files = {path.name for path in (tmp_path / suffix).rglob("*") if path.is_file()}
        assert files == {"tls.crt", "tls.key", "ca.crt", "credentials"}
    plain = str(pods(render(SCRAPED)))
    assert "FP8WATCH_METRICS" not in plain
    assert "secretName" not in plain


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"metricsTls": {"existingSecret": "s"}}, "metricsTls.serverName"),
        ({"metricsTls": {"clientCaSecret": "s"}}, "metricsTls.clientCaSecret"),
        ({"metricsTls": TLS | {"clientCaSecret": "s"}}, "metricsTls.scraperSecret: monitors need a client certificate"),
        ({"metricsTls": TLS | {"scraperSecret": "s"}}, "metricsTls.scraperSecret: without metricsTls.clientCaSecret"),
        ({"metricsPassword": {"existingSecret": "No Name"}}, "/metricsPassword/existingSecret"),
        ({"metricsTls": {"clientCaSecret": "No Name"}}, "/metricsTls/clientCaSecret"),
        ({"metricsTls": {"scraperSecret": 1}}, "/metricsTls/scraperSecret"),
        ({"metricsPassword": {"password": "secret"}}, "metricsPassword"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(values: dict[str, Any], key: str) -> None:
    with pytest.raises(helm_python.HelmError, match=key):
        render({**SCRAPED, "podMonitor": {"enabled": True}, **values})


@pytest.mark.parametrize("has_tls", [True, False])
def test_the_console_speaks_tls_with_the_secrets_files_or_is_told_to_do_without(has_tls: bool) -> None:
    values: dict[str, Any] = {"enabled": True, "nodeSelector": {"a": "b"}}
    values |= {"tls": {"existingSecret": "console-tls"}} if has_tls else {"allowPlain": True}
    spec = pods(render({"console": values}))["r-fp8watch-console"]["spec"]
    (container,) = spec["containers"]
    arguments = container["args"]
    schemes = {container[probe]["httpGet"].get("scheme") for probe in ("livenessProbe", "readinessProbe")}
    secrets = {v["name"]: v["secret"]["secretName"] for v in spec["volumes"] if "secret" in v}
    assert ("--allow-plain" in arguments) is not has_tls
    if has_tls:
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        for option, name in (("--tls-cert", "tls.crt"), ("--tls-key", "tls.key")):
            file = Path(arguments[arguments.index(option) + 1])
            assert file.name == name
            assert secrets[mounts[str(file.parent)]] == "console-tls"
    else:
        assert "--tls-cert" not in arguments
        assert secrets == {}
    assert schemes == {"HTTPS"} if has_tls else schemes == {None}
    assert ("https with the certificate" in notes({"console": values})) is has_tls
