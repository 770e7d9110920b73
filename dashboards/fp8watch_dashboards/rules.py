"""The alert rules: where the file is, and its copy in the chart: `python -m fp8watch_dashboards.rules` renews it.

`dashboards/rules/fp8watch.yaml` is the one that is edited. A chart can only hold what lies in its own folder, so it has
a copy, and a test fails when the two differ.
"""

from __future__ import annotations

import sys
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "rules" / "fp8watch.yaml"
CHART_COPY = FILE.parents[2] / "helm" / "fp8watch" / "files" / "fp8watch-rules.yaml"


def text() -> str:
    """The rules as they are edited."""
    return FILE.read_text(encoding="utf-8")


def main() -> None:
    """Renew the chart's copy; prints where."""
    CHART_COPY.write_text(text(), encoding="utf-8")
    sys.stdout.write(f"{CHART_COPY}\n")


if __name__ == "__main__":
    main()
