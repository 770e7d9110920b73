"""Copies the alert rules into the chart: `python -m fp8watch_dashboards.rules`.

Edit `dashboards/rules/fp8watch.yaml`. A chart can only use files in its own folder, so it has a copy; a test fails if
the two differ.
"""

from __future__ import annotations

import sys
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "rules" / "fp8watch.yaml"
CHART_COPY = FILE.parents[2] / "helm" / "fp8watch" / "files" / "fp8watch-rules.yaml"


def text() -> str:
    """The content of the rules file."""
    return FILE.read_text(encoding="utf-8")


def main() -> None:
    """Write the chart's copy and print its path."""
    CHART_COPY.write_text(text(), encoding="utf-8")
    sys.stdout.write(f"{CHART_COPY}\n")


if __name__ == "__main__":
    main()
