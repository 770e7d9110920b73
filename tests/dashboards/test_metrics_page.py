"""docs/metrics.md is the catalogue, whole and current."""

from __future__ import annotations

from fp8watch.metrics import CATALOGUE
from fp8watch_dashboards import metrics_page


def test_the_page_is_current():
    assert metrics_page.FILE.read_text(encoding="utf-8") == metrics_page.text(), (
        "run: python -m fp8watch_dashboards.metrics_page"
    )


def test_every_metric_has_one_row_with_its_labels_and_help():
    rows = [line for line in metrics_page.text().splitlines() if line.startswith("| `")]
    assert len(rows) == len(CATALOGUE)
    for metric in CATALOGUE:
        (row,) = [line for line in rows if line.startswith(f"| `{metric.name}` |")]
        assert metric.help in row
        assert all(f"`{label}`" in row for label in metric.labels)
        assert row.count(" | ") == 3
