"""The console in a real browser: the command serves it, the charts are painted, the live part goes on by itself."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
import urllib.request

import dashboard_runs as runs
import pytest
from free_ports import free_port

from fp8watch.controller.stores.sqlite import SqliteStore

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
LAUNCH = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
CUT_OFF = """() => [...document.querySelectorAll(
    '[data-testid=stMetric] *, [data-testid=stSelectbox] *, [data-testid=stCheckbox] *'
  )].filter(e => e.innerText && e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX != 'visible')
  .map(e => e.innerText)"""
"""Texts of the page's head that are wider than the room they have."""
pytestmark = pytest.mark.browser


@pytest.fixture
def served(tmp_path):
    """The console's own command on a free port, over a folder with two runs."""
    runs.write_rescued(tmp_path)
    store = runs.write_healthy(tmp_path, "growing-run", steps=60)
    port = free_port()
    command = "from fp8watch_dashboards.cli import app; app()"
    process = subprocess.Popen(
        [sys.executable, "-c", command, "--dir", str(tmp_path), "--port", str(port)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=2).close()
                break
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}", store
    finally:
        process.terminate()
        process.wait(timeout=20)


def test_the_page_paints_its_charts_and_follows_the_run(served):
    from playwright.sync_api import sync_playwright

    address, store = served
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=LAUNCH)
        page = browser.new_page(viewport={"width": 1440, "height": 1900})
        page.goto(f"{address}/?run=rescued-run")
        page.wait_for_selector(".js-plotly-plot .scatterlayer path.js-line", timeout=60_000)
        page.wait_for_selector(".js-plotly-plot .heatmaplayer image", timeout=60_000)
        assert page.get_by_test_id("stMetricValue").all_inner_texts()[:2] == ["240", "1"]
        page.locator("text=repair_scale").first.wait_for(state="attached", timeout=60_000)
        assert page.get_by_test_id("stException").count() == 0
        page.set_viewport_size({"width": 800, "height": 1900})
        page.wait_for_timeout(500)
        deadline = time.monotonic() + 30  # until it is laid out anew
        while (cut_off := page.evaluate(CUT_OFF)) and time.monotonic() < deadline:
            page.wait_for_timeout(100)
        assert cut_off == []

        page.goto(f"{address}/?run=growing-run")
        page.wait_for_function(
            "document.querySelector('[data-testid=stMetricValue]')?.innerText == '60'", timeout=60_000
        )
        with contextlib.closing(SqliteStore(store)) as db:
            db.append("growing-run", [runs.frame("growing-run", 61, num_blocks=2, loss=1.25)])
        page.wait_for_function(
            "document.querySelector('[data-testid=stMetricValue]')?.innerText == '61'", timeout=30_000
        )
        page.get_by_test_id("stMetricValue").filter(has_text="1.2500").wait_for(timeout=30_000)
        browser.close()
