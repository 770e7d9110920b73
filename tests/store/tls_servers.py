"""Redis servers that speak TLS, with certificates of two authorities: ours and theirs."""

from __future__ import annotations

import shutil
import subprocess
from datetime import datetime
from pathlib import Path

import redis as redis_py
import redis_servers
from free_ports import free_port


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


CA_SETTINGS = """[ca]
default_ca = dated
[dated]
database = index
new_certs_dir = .
rand_serial = yes
default_md = sha256
policy = any
copy_extensions = copy
unique_subject = no
[any]
commonName = supplied
"""


def dated(folder: Path, name: str, signer: str, *, begins: datetime, ends: datetime, subject: str) -> None:
    """A certificate and key `name` of an authority, valid between two moments (UTC), in the past or not."""
    openssl(
        folder, "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}",
        "-addext", f"subjectAltName={subject}", "-keyout", f"{name}.key", "-out", f"{name}.csr",
    )  # fmt: skip
    (folder / "index").write_text("")
    (folder / "ca.cnf").write_text(CA_SETTINGS)
    openssl(
        folder, "ca", "-config", "ca.cnf", "-batch", "-notext", "-cert", f"{signer}.crt", "-keyfile", f"{signer}.key",
        "-startdate", f"{begins:%Y%m%d%H%M%SZ}", "-enddate", f"{ends:%Y%m%d%H%M%SZ}", "-in", f"{name}.csr",
        "-out", f"{name}.crt",
    )  # fmt: skip


def protect(folder: Path, name: str, copy: str) -> None:
    """A copy of a private key that takes a password."""
    openssl(folder, "ec", "-in", f"{name}.key", "-aes256", "-passout", "pass:secret", "-out", f"{copy}.key")


class TlsServer(redis_servers.Server):
    """Speaks TLS only; asks its clients for a certificate of `ours`."""

    def __init__(self, folder: Path, name: str, *, asks_clients: bool) -> None:
        self.port, self.folder = free_port(), folder
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


def why_not() -> str:
    """Why there can be no such server here; empty when there can."""
    if shutil.which("openssl") is None:
        return "no openssl program to make certificates with"
    # A server stops at the first setting that it does not know: the second where it has TLS.
    known = subprocess.run(
        [redis_servers.SERVER, "--port", "0", "--tls-port", "0", "--no-such-setting", "x"],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    is_built = "no-such-setting" in known.stdout + known.stderr
    return "" if is_built else "this redis-server is built without TLS"


def make_certificates(folder: Path) -> None:
    """`server` and `agent` are ours, `impostor` theirs, `elsewhere` ours for another host."""
    for name in ("ours", "theirs"):
        authority(folder, name)
    certificate(folder, "server", "ours", "IP:127.0.0.1")
    certificate(folder, "impostor", "theirs", "IP:127.0.0.1")
    certificate(folder, "elsewhere", "ours", "DNS:another.example")
    certificate(folder, "agent", "ours", "DNS:agent")
