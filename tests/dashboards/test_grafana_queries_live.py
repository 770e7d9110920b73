"""Every query of the dashboard, asked of a real Prometheus that has scraped the real exporter."""

from __future__ import annotations

import json
import math
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

import dashboard_runs as runs
import msgspec
import numpy as np
import pytest
from free_ports import free_port

from fp8watch.columns import pack
from fp8watch.records import ActionRecord, Finding
from fp8watch_agent.exporter import Exporter
from fp8watch_agent.metrics_state import MetricsState
from fp8watch_dashboards import grafana

pytestmark = pytest.mark.prometheus
RUN, BLOCKS, STEPS = "r", 2, 20
COUNT = len(runs.columns(BLOCKS))
CONFIG = """\
global: {scrape_interval: 1s, scrape_timeout: 1s}
scrape_configs:
  - {job_name: fp8watch, static_configs: [{targets: [TARGETS]}]}
"""
WITHOUT_SERIES = {"series left out"}
"""Legends of what did not happen in this run: nothing was over the budget."""


def frame(step: int):
    headroom = np.full(COUNT, 1.5)
    headroom[0] = -1.0 if step % 5 == 0 else 0.5
    base = runs.frame(RUN, step, num_blocks=BLOCKS, loss=math.nan if step == 7 else 2.0, headroom=headroom)
    counts = {
        "quantized": pack(np.full(COUNT, 1000), "u8"),
        "saturated": pack(np.full(COUNT, 10), "u8"),
        "underflowed": pack(np.full(COUNT, 250), "u8"),
    }
    scalars = {
        **base.scalars,
        "grad_norm": 3.0,
        "clip_limit": 1.0,
        "step_seconds": 0.1,
        "overhead_seconds": 0.0005,
        "update_skipped": float(step == 7),
    }
    return msgspec.structs.replace(base, columns={**base.columns, **counts}, scalars=scalars)


def incident() -> list[Finding | ActionRecord]:
    finding = Finding(
        id="f", run=RUN, attempt=0, step=7, onset_step=7, detector="nonfinite", severity="act", cause="precision"
    )
    action = ActionRecord(
        id="a", run=RUN, attempt=0, action="bf16_all", params={}, rule="x", finding="f", status="applied",
        decided_step=7, applied_step=8, readback="ok", outcome="helped",
    )  # fmt: skip
    return [finding, action]


@dataclass(slots=True)
class Prometheus:
    url: str

    def query(self, expr: str) -> list[dict[str, Any]]:
        address = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expr})}"
        try:
            with urllib.request.urlopen(address, timeout=5) as response:
                return json.load(response)["data"]["result"]
        except urllib.error.HTTPError as error:
            if error.code == 503:
                return []  # up, and not ready yet
            raise AssertionError(f"{expr}: {error.read().decode()}") from error
        except OSError:
            return []  # not up yet

    def wait(self, expr: str) -> None:
        deadline = time.monotonic() + 30
        while not self.query(expr):
            assert time.monotonic() < deadline, expr
            time.sleep(0.2)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """Two exporters, as after a restart of the agent elsewhere: the first one's series are still in the range."""
    folder = tmp_path_factory.mktemp("prometheus")
    states = [MetricsState(clock=time.monotonic) for _ in range(2)]
    exporters = [Exporter(state) for state in states]
    for exporter in exporters:
        exporter.start("127.0.0.1", 0)
    config = folder / "prometheus.yml"
    config.write_text(CONFIG.replace("TARGETS", ", ".join(f"'{exporter.target}'" for exporter in exporters)))
    port = free_port()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            server = Prometheus(url=f"http://127.0.0.1:{port}")
            for state in states:
                state.observe(runs.record(RUN, num_blocks=BLOCKS).hello)
                state.observe(runs.layout(RUN, num_blocks=BLOCKS))
                state.observe(frame(1))
            server.wait(f'count(fp8watch_steps_total{{run="{RUN}"}} == 1) == 2')
            for state in states:
                for step in range(2, STEPS + 1):
                    state.observe(frame(step))
                for record in incident():
                    state.record(record)
                state.drop(RUN, "malformed")
                state.store_error(RUN)
            server.wait(f'count(fp8watch_steps_total{{run="{RUN}"}} == {STEPS}) == 2')
            # A second sample with the new values; of this series they are the first.
            server.wait(f'min(count_over_time(fp8watch_findings_total{{run="{RUN}"}}[1m])) >= 2')
            yield server
        finally:
            process.kill()
            process.wait()
            for exporter in exporters:
                exporter.stop()


def targets():
    for panel in json.loads(grafana.text())["panels"]:
        for target in panel.get("targets", []):
            yield pytest.param(panel, target, id=f"{panel['title']}-{target['refId']}")


def ask(prometheus: Prometheus, expr: str) -> list[dict[str, Any]]:
    return prometheus.query(expr.replace("$__rate_interval", "5m").replace("$run", RUN).replace("$job", ".+"))


@pytest.mark.parametrize(("panel", "target"), list(targets()))
def test_every_query_finds_series_and_one_line_a_legend(prometheus, panel, target):
    series = ask(prometheus, target["expr"])
    if target["legendFormat"] in WITHOUT_SERIES:
        assert series == []
        return
    assert series
    # case: DSH-03
    shown = [json.dumps(item["metric"], sort_keys=True) for item in series]
    assert len(set(shown)) == len(shown)
    if panel["type"] == "stat":
        assert len(series) == 1
    assert all(math.isfinite(float(item["value"][1])) for item in series)
    if panel["fieldConfig"]["defaults"]["unit"] == "percentunit":
        assert all(0 <= float(item["value"][1]) <= 1 for item in series)


def test_values_are_those_of_the_run(prometheus):
    expressions = {
        panel["title"]: panel["targets"][0]["expr"]
        for panel in json.loads(grafana.text())["panels"]
        if panel["type"] != "row"
    }

    def values(title: str) -> dict[str, float]:
        return {
            ",".join(item["metric"].values()): float(item["value"][1]) for item in ask(prometheus, expressions[title])
        }

    assert values("Step") == {RUN: STEPS}
    assert list(values("State")) == ["running"]
    assert values("Modules seen")[RUN] == pytest.approx(1.0)
    assert values("Overhead")[RUN] == pytest.approx(0.005)
    assert values("Saturated elements") == pytest.approx({"grad_output": 0.01, "input": 0.01, "weight": 0.01})
    assert values("Underflowed elements") == pytest.approx({"grad_output": 0.25, "input": 0.25, "weight": 0.25})
    assert values("Least head-room by tensor class")["input"] == pytest.approx(-1.0, abs=1e-4)
    assert values("Non-finite values")["loss"] > 0
    assert set(values("Findings")) == {"precision,nonfinite,act"}
    assert set(values("Actions")) == {"bf16_all,pending", "bf16_all,helped"}
