"""docs/settings.md names every variable that the product reads, as the settings describe themselves."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from fp8watch.settings import Settings
from fp8watch_dashboards import settings_page

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = re.compile(r"FP8WATCH_[A-Z_]*[A-Z]\b")


def documented() -> dict[str, str]:
    """Variable -> its row."""
    rows = (line for line in settings_page.text().splitlines() if line.startswith("| `FP8WATCH_"))
    return {row.split("`")[1]: row for row in rows}


def test_the_page_is_current() -> None:
    assert settings_page.FILE.read_text(encoding="utf-8") == settings_page.text(), (
        "run: python -m fp8watch_dashboards.settings_page"
    )


def test_every_setting_has_a_row_that_says_something() -> None:
    rows = documented()
    for name, field in Settings.model_fields.items():
        _, variable, default, meaning, _ = re.split(r"(?<!\\)\|", rows[f"FP8WATCH_{name.upper()}"])
        assert variable.strip() == f"`FP8WATCH_{name.upper()}`"
        assert len(meaning.strip()) > 10, name
        assert (default.strip() == "") is (field.default is None), name
    assert "| `9464` | Loopback port of /metrics" in rows["FP8WATCH_METRICS_PORT"]
    assert "| `1` |" in rows["FP8WATCH_REPORT"]


@pytest.mark.parametrize("files", [["fp8watch/**.py", "agent/**.py", "dashboards/**.py"], ["helm", "*.yml", "agent"]])
def test_no_variable_is_named_anywhere_that_the_page_does_not_have(files: list[str]) -> None:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", *files], capture_output=True, text=True, check=False
    ).stdout.split()
    if not listed:
        pytest.skip("not a git checkout")
    named = {name for file in listed if (ROOT / file).is_file() for name in VARIABLE.findall((ROOT / file).read_text())}
    assert len(named) > 5
    assert named - documented().keys() == set()


def test_a_field_without_a_docstring_would_be_noticed() -> None:
    assert dict(settings_page.field_docstrings(_Example)) == {"told": "What it is."}


class _Example:
    told: int = 1
    """What
    it is."""

    untold: int = 2
