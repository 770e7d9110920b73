"""The run that `test_prometheus` and `test_prometheus_alerts` look at: made once, for it takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from scraped import ScrapedRun


@pytest.fixture(scope="session")
def scraped_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScrapedRun]:
    run = ScrapedRun(tmp_path_factory.mktemp("prometheus"))
    try:
        run.train()
        yield run
    finally:
        run.end()
