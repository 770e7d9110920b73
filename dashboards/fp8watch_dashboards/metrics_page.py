"""The metric reference page: `python -m fp8watch_dashboards.metrics_page` writes `docs/metrics.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from fp8watch.metrics import CATALOGUE, HEADROOM_BUCKETS, Metric

FILE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"

_INTRODUCTION = """\
# Metrics

This page is generated from the catalogue in `fp8watch/metrics.py` by `python -m fp8watch_dashboards.metrics_page`;
`fp8watch metrics` prints the same list. The agent exports the metrics on `/metrics`, by default on loopback, port 9464.

- Gauges keep the last finite value. NaN and infinity are counted in `fp8watch_nonfinite_total` and never exported as
  samples, so that no rule has to handle them.
- A value that a run does not report has no series: 0 never means "not observed".
- Per-tensor series are per block, with an empty `layer`. The worst layers also have gauges of their own, but no
  counters, so that a sum over a counter counts every element once. Select `layer=""` or aggregate with `min` and `max`.
- Element counters grow only on sampled steps: divide them by `fp8watch_quantized_elements_total`.
- `_max_60s` and `_min_60s` hold an extreme for a minute, so that a scrape every 15 seconds sees a fault of one step.
"""

_TITLES = {"gauge": "Gauges", "counter": "Counters", "histogram": "Histograms"}


def text() -> str:
    """The page: one table per type of metric, in the order of the catalogue."""
    parts = [_INTRODUCTION]
    for kind, title in _TITLES.items():
        rows = [metric for metric in CATALOGUE if metric.kind == kind]
        parts.append(f"## {title}\n\n| name | labels | unit | meaning |\n| --- | --- | --- | --- |\n")
        parts[-1] += "".join(_row(metric) for metric in rows)
    buckets = ", ".join(f"{bound:g}" for bound in HEADROOM_BUCKETS)
    parts.append(f"Upper bounds of the buckets, in powers of two: {buckets}, +Inf. Below 0 the tensor clips.\n")
    return "\n".join(parts)


def main() -> None:
    """Write the page and print its path."""
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(text(), encoding="utf-8")
    sys.stdout.write(f"{FILE}\n")


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    meaning = metric.help.replace("|", "\\|")
    return f"| `{metric.name}` | {labels} | {metric.unit} | {meaning} |\n"


if __name__ == "__main__":
    main()
