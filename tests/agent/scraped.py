"""A run whose agent a real Prometheus scrapes every second, with the shipped rules and the shipped scrape job."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import alert_receiver
import hand_made as make
import yaml
from alert_receiver import Alertmanager
from free_ports import free_port

from fp8watch.settings import Settings
from fp8watch.transport import Channel, endpoint

DASHBOARDS = Path(__file__).resolve().parents[2] / "dashboards"
QUANTIZED, SATURATED, BLOCKS = 1000, 37, 2
NUM_STEPS, FAULT_STEP, NAN_STEP, INF_STEP = 120, 40, 70, 71
HEADROOM_LOG2, FAULT_LOG2 = 1.0, -5.0
POD = {"pod": "fp8watch-agent-x1", "namespace": "monitoring"}
"""Target labels as an operator's relabelling adds them."""
RUNBOOKS = "https://runbooks.example/main/"
HONOURS = {"honoured": True, "not-honoured": False}
"""Job -> honor_labels. Both keep `fp8watch_rank_info` alone: other tests sum over all jobs."""


class Prometheus:
    """The server. It begins to scrape about five seconds after its start, whatever it is told."""

    def __init__(self, folder: Path, targets: Path, alertmanager: str | None) -> None:
        """`alertmanager`: host and port of who is told."""
        (folder / "rules.yaml").write_text(re.sub(r"for: \d+m", "for: 1s", _with_links(RUNBOOKS)))
        (folder / "prometheus.yml").write_text(yaml.safe_dump(_config(targets, alertmanager)))
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        with (folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["prometheus", f"--config.file={folder / 'prometheus.yml'}",
                 f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}"],
                stdout=log, stderr=log,
            )  # fmt: skip

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def get(self, path: str, **query: str) -> Any:
        """The answer's `data`; None while the server starts."""
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(address, timeout=5) as response:
                return json.load(response)["data"]
        except OSError:
            return None

    def query(self, promql: str) -> list[float]:
        """Values of the instant vector; empty while the server starts."""
        return [float(item["value"][1]) for item in self.vector(promql)]

    def vector(self, promql: str) -> list[dict[str, Any]]:
        """The instant vector, with labels."""
        answer = self.get("query", query=promql)
        return answer["result"] if answer is not None else []

    def is_firing(self, alert: str, **labels: str) -> bool:
        """Whether the alert fires now."""
        answer = self.get("alerts") or {"alerts": []}
        wanted = {"alertname": alert, **labels}.items()
        return any(item["state"] == "firing" and wanted <= item["labels"].items() for item in answer["alerts"])


class ScrapedRun:
    """A run of which Prometheus has seen every second."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / ".fp8watch"
        self.home.mkdir()
        (self.home / "targets.json").write_text("[]")
        self.channel = Channel(run="r", settings=Settings(dir=self.home, metrics_port=0))
        self.channel.set_preamble([make.hello("r"), make.layout("r", blocks=BLOCKS)])
        welcome = make.wait_for(self.channel.take)[0]
        self.metrics_url = welcome.metrics_url
        self.alerts = Alertmanager(folder) if alert_receiver.PROGRAM else None
        self.prometheus = Prometheus(folder, self.home / "targets.json", self.alerts and self.alerts.address)
        self.steps = 0
        self._is_over = False

    def train(self) -> None:
        make.wait_for(lambda: self.prometheus.query('up{job="fp8watch"} == 1'), 30, "a first scrape")
        for step in range(1, NUM_STEPS + 1):
            if step == FAULT_STEP:
                self.wait_until_scraped()  # the next scrape is a second away
            scalars = {"loss": 2.0, "grad_norm": 0.5}
            if step == NAN_STEP:
                scalars["loss"] = math.nan
            if step == INF_STEP:
                scalars["grad_norm"] = math.inf
            self.step(scalars, FAULT_LOG2 if step == FAULT_STEP else HEADROOM_LOG2)
            if step != FAULT_STEP:  # the step after the fault follows at once: no scrape falls between
                time.sleep(0.05)
        self.wait_until_scraped()

    def step(self, scalars: dict[str, float], headroom_log2: float = HEADROOM_LOG2) -> None:
        self.steps += 1
        self.channel.send(
            make.frame("r", self.steps, 3 * BLOCKS, amax=1.0, scale=448.0 / 2.0**headroom_log2, quantized=QUANTIZED,
                       saturated=[SATURATED, 0, 0] * BLOCKS, underflowed=0, scalars=scalars)
        )  # fmt: skip

    def wait_until_scraped(self) -> None:
        make.wait_for(lambda: self.prometheus.query(f"fp8watch_step == {self.steps}"))

    def kill_agent(self) -> None:
        """End the run's agent without a word."""
        found = endpoint.read(self.home, "r")
        assert found is not None
        os.kill(found.pid, signal.SIGKILL)
        make.wait_for(lambda: make.is_gone(found.pid))

    def replace_agent(self) -> None:
        """Kill the agent and wait for the next. Nothing is sent meanwhile: a frame lost would be waited for."""
        before = endpoint.read(self.home, "r")
        self.channel.set_preamble([make.hello("r", step=self.steps), make.layout("r", blocks=BLOCKS)])
        self.kill_agent()
        make.wait_for(lambda: endpoint.read(self.home, "r") != before, 30, "another agent")

    def crash(self) -> None:
        """The node of trainer and agent is gone: no goodbye, and nobody to notice that there is none."""
        self.channel.close()
        self.kill_agent()
        self._is_over = True

    def end(self) -> None:
        if not self._is_over:
            self.channel.send(make.goodbye("r", self.steps))
            self.channel.close()
            self._is_over = True
        self.prometheus.stop()
        if self.alerts is not None:
            self.alerts.stop()


def _with_links(prefix: str) -> str:
    """The shipped rules with whole addresses of runbooks, made by the command that the page about alerts gives."""
    command = re.search(r"`sed '(.+)'`", (DASHBOARDS.parent / "docs" / "alerts.md").read_text())
    assert command is not None
    program = command[1].replace("https://git.example.com/fp8watch/blob/main/", prefix)
    rules = DASHBOARDS / "rules" / "fp8watch.yaml"
    return subprocess.run(["sed", program, str(rules)], capture_output=True, text=True, check=True).stdout


def _config(targets: Path, alertmanager: str | None) -> dict[str, Any]:
    shipped = yaml.safe_load((DASHBOARDS / "prometheus" / "prometheus.yml").read_text())
    (job,) = [job for job in shipped["scrape_configs"] if job["job_name"] == "fp8watch"]
    discovery = [{"files": [str(targets)], "refresh_interval": "1s"}]
    job = {**job, "file_sd_configs": discovery}
    in_pods = [
        {**job, "job_name": name, "honor_labels": is_honoured,
         "relabel_configs": [{"target_label": label, "replacement": value} for label, value in POD.items()],
         "metric_relabel_configs": [
             {"source_labels": ["__name__"], "regex": "fp8watch_rank_info", "action": "keep"}
         ]}
        for name, is_honoured in HONOURS.items()
    ]  # fmt: skip
    for group in shipped["alerting"]["alertmanagers"]:
        group["static_configs"] = [{"targets": [] if alertmanager is None else [alertmanager]}]
    return {
        "alerting": shipped["alerting"],
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "500ms"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [job, *in_pods],
    }
