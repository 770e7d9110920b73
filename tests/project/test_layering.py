"""Who may import what, proven in fresh interpreters."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fp8watch

WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def run_without(blocked: set[str], code: str) -> subprocess.CompletedProcess[str]:
    script = WITHOUT.format(blocked=blocked) + code
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)


def test_importing_fp8watch_loads_nothing_heavy() -> None:
    code = "import sys, fp8watch; print(sorted({m.split('.')[0] for m in sys.modules}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    for heavy in ("torch", "fp8watch_agent", "fp8watch_dashboards", "prometheus_client", "redis", "streamlit"):
        assert repr(heavy) not in out


@pytest.mark.parametrize(
    "module",
    [
        "fp8watch.detect.pipeline",
        "fp8watch.policy",
        "fp8watch.controller.service",
        "fp8watch.replay.run",
        "fp8watch_agent.server",
        "fp8watch_dashboards.queries",
        "fp8watch.cli",
    ],
)
def test_what_is_not_the_training_process_starts_without_torch(module: str) -> None:
    done = run_without({"torch"}, f"import {module}")
    assert done.returncode == 0, done.stderr


def test_the_training_process_needs_neither_exporter_nor_dashboards() -> None:
    absent = {"redis", "prometheus_client", "streamlit", "plotly", "pandas", "grafana_foundation_sdk"}
    done = run_without(absent, "import fp8watch; fp8watch.attach; fp8watch.Checkpoints; fp8watch.Watch")
    assert done.returncode == 0, done.stderr


def test_what_the_readme_calls_needs_no_import_but_the_librarys() -> None:
    code = (
        "import sys, fp8watch; assert 'torch' not in sys.modules; import torch;"
        "model = torch.nn.Sequential(torch.nn.Linear(32, 32)); fp8watch.emulation.convert(model);"
        "print(type(model[0]).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("Fp8Linear\n", "")
    for name in set(dir(fp8watch)) - set(fp8watch.__all__):
        assert getattr(fp8watch, name).__name__ == f"fp8watch.{name}"


def test_public_names_are_what_all_says() -> None:
    assert fp8watch.__all__ == sorted(fp8watch.__all__)
    for name in fp8watch.__all__:
        assert getattr(fp8watch, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'atach'"):
        fp8watch.atach  # noqa: B018
