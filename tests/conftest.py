"""Shared fixtures: every test works in a folder of its own, and what a machine lacks is left out by name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

NEEDS = {
    "prometheus": ("prometheus", "promtool"),
    "alertmanager": ("prometheus-alertmanager", "amtool"),
    "browser": ("chromium",),
    "redis": ("redis-server",),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what needs a program that is not on this machine."""
    for marker, programs in NEEDS.items():
        missing = [program for program in programs if shutil.which(program) is None]
        if missing:
            skip = pytest.mark.skip(reason=f"not on this machine: {', '.join(missing)}")
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(skip)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test writes into the tree or sees another's runs, whatever the developer's environment says."""
    for name in list(os.environ):
        if name.startswith("FP8WATCH_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FP8WATCH_DIR", str(tmp_path / ".fp8watch"))
    monkeypatch.setenv("FP8WATCH_METRICS_PORT", "0")
    monkeypatch.chdir(tmp_path)
