"""A real Prometheus scrapes the live endpoint: ratios, one-step faults between scrapes, non-finite values."""

from __future__ import annotations

import math
import subprocess
import urllib.request

import pytest
from scraped import BLOCKS, FAULT_LOG2, HEADROOM_LOG2, NUM_STEPS, QUANTIZED, SATURATED, ScrapedRun

from fp8watch.metrics import CATALOGUE

pytestmark = pytest.mark.prometheus


@pytest.fixture(scope="module")
def run(scraped_run: ScrapedRun) -> ScrapedRun:
    return scraped_run


def test_promtool_has_nothing_to_say_about_the_live_endpoint(run: ScrapedRun) -> None:
    with urllib.request.urlopen(run.metrics_url, timeout=5) as response:
        text = response.read()
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    shown = {line.split()[2] for line in text.decode().splitlines() if line.startswith("# TYPE")}
    assert shown <= {metric.name for metric in CATALOGUE}
    assert "fp8watch_tensor_headroom_log2" in shown


# case: PRM-05
def test_promql_gives_the_saturation_ratio(run: ScrapedRun) -> None:
    ratio = "sum(rate(fp8watch_saturated_elements_total[1m])) / sum(rate(fp8watch_quantized_elements_total[1m]))"
    expected = pytest.approx(SATURATED / QUANTIZED / 3, rel=1e-6)
    assert run.prometheus.query(ratio) == [expected]
    assert run.prometheus.query(ratio.replace("sum(", "sum by (run) (")) == [expected]
    by_class = 'sum(fp8watch_saturated_elements_total{run="r",tensor="input"})'
    assert run.prometheus.query(by_class) == [SATURATED * BLOCKS * NUM_STEPS]


def test_a_one_step_fault_between_two_scrapes_is_seen(run: ScrapedRun) -> None:
    raw = run.prometheus.query("min(min_over_time(fp8watch_tensor_headroom_log2[1m]))")
    assert raw == [pytest.approx(HEADROOM_LOG2)], "the fault fell into a scrape; the test shows nothing"
    twin = run.prometheus.query("min(min_over_time(fp8watch_tensor_headroom_log2_min_60s[10s]))")
    assert twin == [pytest.approx(FAULT_LOG2)]
    assert run.prometheus.query('sum(fp8watch_tensor_clipped_steps_total{tensor="weight"})') == [2.0]


def test_nonfinite_values_are_flagged_and_gauges_stay_finite(run: ScrapedRun) -> None:  # case: PRM-11
    flagged = run.prometheus.query("sum by (quantity) (increase(fp8watch_nonfinite_total[1m])) > 0")
    assert len(flagged) == 2
    assert run.prometheus.query("fp8watch_loss") == [2.0]
    assert run.prometheus.query("fp8watch_grad_norm") == [0.5]
    gauge_names = "|".join(metric.name for metric in CATALOGUE if metric.kind == "gauge")
    samples = run.prometheus.query(f'{{__name__=~"{gauge_names}"}}')
    assert len(samples) > 20
    assert all(map(math.isfinite, samples))


def test_histogram_quantiles_work_on_negative_bounds(run: ScrapedRun) -> None:
    query = 'histogram_quantile(0.5, sum by (le) (fp8watch_headroom_log2_bucket{tensor="input"}))'
    (median,) = run.prometheus.query(query)
    assert 0.5 <= median <= 1.0


def test_labels_of_the_run_are_its_own(run: ScrapedRun) -> None:
    assert run.prometheus.query('fp8watch_step{run="r"}') == [NUM_STEPS]
    assert run.prometheus.query('{exported_run!=""}') == []
