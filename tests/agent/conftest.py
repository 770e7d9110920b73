"""The run that `test_prometheus` and `test_prometheus_alerts` look at: each its own, for the second ends its run.

Certificates and ports come from what makes them for the stores' tests.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "store"))

from scraped import ScrapedRun


@pytest.fixture(scope="module")
def scraped_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScrapedRun]:
    run = ScrapedRun(tmp_path_factory.mktemp("prometheus"))
    try:
        run.train()
        yield run
    finally:
        run.end()
