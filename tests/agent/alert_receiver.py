"""A real Alertmanager with the shipped routes, and the webhooks that it calls."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from free_ports import free_port

SHIPPED = Path(__file__).resolve().parents[2] / "dashboards" / "prometheus" / "alertmanager.yml"
PROGRAM = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
"""Debian's name, and everybody else's."""
WAITS = {"group_wait": "1s", "group_interval": "1s"}


class Receiver:
    """Takes what is posted to it: (name of the receiver, payload) in the order of arrival."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, dict[str, Any]]] = []
        messages = self.messages

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                messages.append((self.path.strip("/"), json.loads(body)))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="webhooks", daemon=True)
        self._thread.start()

    def address(self, receiver: str) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/{receiver}"

    def alerts(self, status: str, **labels: str) -> list[tuple[str, dict[str, Any]]]:
        """The alerts of that status with these labels, each with the receiver that was told."""
        return [
            (receiver, alert)
            for receiver, message in list(self.messages)
            for alert in message["alerts"]
            if alert["status"] == status and labels.items() <= alert["labels"].items()
        ]

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


class Alertmanager:
    """The server, alone and on loopback; it tells `receiver`."""

    def __init__(self, folder: Path) -> None:
        assert PROGRAM is not None
        self.receiver = Receiver()
        config = yaml.safe_load(SHIPPED.read_text())
        config["route"] |= WAITS
        for receiver in config["receivers"]:
            for webhook in receiver["webhook_configs"]:
                webhook["url"] = self.receiver.address(receiver["name"])
        (folder / "alertmanager.yml").write_text(yaml.safe_dump(config))
        self.address = f"127.0.0.1:{free_port()}"
        with (folder / "alertmanager.log").open("wb") as log:
            self._process = subprocess.Popen(
                [PROGRAM, f"--config.file={folder / 'alertmanager.yml'}", f"--storage.path={folder / 'alerts'}",
                 f"--web.listen-address={self.address}", "--cluster.listen-address="],
                stdout=log, stderr=log,
            )  # fmt: skip

    def alerts(self) -> list[dict[str, Any]]:
        """What it holds, silenced and inhibited ones too; empty while it starts."""
        try:
            with urllib.request.urlopen(f"http://{self.address}/api/v2/alerts", timeout=5) as answer:
                return list(json.load(answer))
        except OSError:
            return []

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self.receiver.stop()
