"""Shared fixtures: every test works in a folder of its own, and what a machine lacks is left out by name."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

# Before torch is imported. With threads of its own each sum depends on how many there are, and where other processes
# want the cores too they wait for each other: ten times as long on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if importlib.util.find_spec("hypothesis"):  # a GPU host may lack it: no test there draws examples
    from hypothesis import HealthCheck, settings

    # How long an example takes says how busy the machine is.
    settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("unhurried")

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
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ".state"))
    monkeypatch.setenv("FP8WATCH_METRICS_PORT", "0")
    monkeypatch.chdir(tmp_path)
