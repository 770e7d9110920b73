"""A real Prometheus scrapes the live endpoint: ratios, one-step faults between scrapes, non-finite values."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hand_made as make
import pytest

from fp8watch.metrics import CATALOGUE
from fp8watch.settings import Settings
from fp8watch.transport import Channel

pytestmark = pytest.mark.prometheus
CONFIG = """\
global: {scrape_interval: 1s, scrape_timeout: 1s}
scrape_configs:
  - job_name: fp8watch
    file_sd_configs: [{files: ["TARGETS"], refresh_interval: 1s}]
"""
QUANTIZED, SATURATED = 1000, 37
NUM_STEPS, FAULT_STEP, NAN_STEP, INF_STEP = 120, 40, 70, 71
HEADROOM_LOG2, FAULT_LOG2 = 1.0, -5.0


class _Prometheus:
    def __init__(self, folder: Path, targets: Path) -> None:
        config = folder / "prometheus.yml"
        config.write_text(CONFIG.replace("TARGETS", str(targets)))
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = (folder / "prometheus.log").open("wb")
        self.process = subprocess.Popen(
            ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}",
             f"--web.listen-address=127.0.0.1:{port}"],
            stdout=self._log, stderr=self._log,
        )  # fmt: skip

    def query(self, promql: str) -> list[float]:
        """Values of the instant vector; empty while the server starts."""
        address = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': promql})}"
        try:
            with urllib.request.urlopen(address, timeout=5) as response:
                answer: Any = json.load(response)
        except OSError:
            return []
        return [float(item["value"][1]) for item in answer["data"]["result"]]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()


class _Run:
    """A run of which Prometheus has seen every second."""

    def __init__(self, folder: Path) -> None:
        home = folder / ".fp8watch"
        home.mkdir()
        (home / "targets.json").write_text("[]")
        self.channel = Channel(run="r", settings=Settings(dir=home, metrics_port=0))
        self.channel.set_preamble([make.hello("r"), make.layout("r", blocks=2)])
        welcome = make.wait_for(self.channel.take)[0]
        self.metrics_url = welcome.metrics_url
        self.prometheus = _Prometheus(folder, home / "targets.json")

    def train(self) -> None:
        make.wait_for(lambda: self.prometheus.query("up == 1"), 30, "a first scrape")
        for step in range(1, NUM_STEPS + 1):
            scalars = {"loss": 2.0, "grad_norm": 0.5}
            if step == NAN_STEP:
                scalars["loss"] = math.nan
            if step == INF_STEP:
                scalars["grad_norm"] = math.inf
            headroom = FAULT_LOG2 if step == FAULT_STEP else HEADROOM_LOG2
            self.channel.send(
                make.frame("r", step, 6, amax=1.0, scale=448.0 / 2.0**headroom, quantized=QUANTIZED,
                           saturated=[SATURATED, 0, 0] * 2, underflowed=0, scalars=scalars)
            )  # fmt: skip
            if step != FAULT_STEP:  # the step after the fault follows at once: no scrape falls between
                time.sleep(0.05)
        make.wait_for(lambda: self.prometheus.query(f"fp8watch_step == {NUM_STEPS}"))

    def end(self) -> None:
        self.channel.send(make.goodbye("r", NUM_STEPS))
        self.channel.close()
        self.prometheus.stop()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Run]:
    run = _Run(tmp_path_factory.mktemp("prometheus"))
    try:
        run.train()
        yield run
    finally:
        run.end()


def test_promtool_has_nothing_to_say_about_the_live_endpoint(run: _Run) -> None:
    with urllib.request.urlopen(run.metrics_url, timeout=5) as response:
        text = response.read()
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    shown = {line.split()[2] for line in text.decode().splitlines() if line.startswith("# TYPE")}
    assert shown <= {metric.name for metric in CATALOGUE}
    assert "fp8watch_tensor_headroom_log2" in shown


def test_promql_gives_the_saturation_ratio(run: _Run) -> None:
    ratio = "sum(rate(fp8watch_saturated_elements_total[6s])) / sum(rate(fp8watch_quantized_elements_total[6s]))"
    expected = pytest.approx(SATURATED / QUANTIZED / 3, rel=1e-6)
    assert run.prometheus.query(ratio) == [expected]
    assert run.prometheus.query(ratio.replace("sum(", "sum by (run) (")) == [expected]
    by_class = 'sum(fp8watch_saturated_elements_total{run="r",tensor="input"})'
    assert run.prometheus.query(by_class) == [SATURATED * 2 * NUM_STEPS]


def test_a_one_step_fault_between_two_scrapes_is_seen(run: _Run) -> None:
    raw = run.prometheus.query("min(min_over_time(fp8watch_tensor_headroom_log2[1m]))")
    assert raw == [pytest.approx(HEADROOM_LOG2)], "the fault fell into a scrape; the test shows nothing"
    twin = run.prometheus.query("min(min_over_time(fp8watch_tensor_headroom_log2_min_60s[10s]))")
    assert twin == [pytest.approx(FAULT_LOG2)]
    assert run.prometheus.query('sum(fp8watch_tensor_clipped_steps_total{tensor="weight"})') == [2.0]


def test_nonfinite_values_are_flagged_and_gauges_stay_finite(run: _Run) -> None:  # case: PRM-11
    flagged = run.prometheus.query("sum by (quantity) (increase(fp8watch_nonfinite_total[1m])) > 0")
    assert len(flagged) == 2
    assert run.prometheus.query("fp8watch_loss") == [2.0]
    assert run.prometheus.query("fp8watch_grad_norm") == [0.5]
    gauge_names = "|".join(metric.name for metric in CATALOGUE if metric.kind == "gauge")
    samples = run.prometheus.query(f'{{__name__=~"{gauge_names}"}}')
    assert len(samples) > 20
    assert all(map(math.isfinite, samples))


def test_histogram_quantiles_work_on_negative_bounds(run: _Run) -> None:
    query = 'histogram_quantile(0.5, sum by (le) (fp8watch_headroom_log2_bucket{tensor="input"}))'
    (median,) = run.prometheus.query(query)
    assert 0.5 <= median <= 1.0


def test_labels_of_the_run_are_its_own(run: _Run) -> None:
    assert run.prometheus.query('fp8watch_step{run="r"}') == [NUM_STEPS]
    assert run.prometheus.query('{exported_run!=""}') == []
