"""The tree keeps the house rules that a linter does not check."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def tracked(*patterns: str) -> list[Path]:
    """Files git tracks, or would if they were added."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    try:
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def test_no_source_file_is_longer_than_400_lines() -> None:
    long = {str(p.relative_to(ROOT)): n for p in tracked("*.py") if (n := len(p.read_text().splitlines())) > 400}
    assert not long


def test_tracked_files_stay_small() -> None:
    assert sum(path.stat().st_size for path in tracked()) < 8 * 1024**2


def test_every_case_named_by_a_test_is_spelled_like_one() -> None:
    named = [m for p in tracked("tests/*.py") for m in re.findall(r"# case" + r": *(.*)", p.read_text())]
    assert all(re.fullmatch(r"[A-Z]{2,3}-\d\d(, [A-Z]{2,3}-\d\d)*", m.strip()) for m in named), named


def test_every_file_that_the_list_of_cases_names_says_which_test_covers_the_case():
    lacking = []
    for case, rest in re.findall(r"^\| ([A-Z]{2,3}-\d\d) \|(.*)$", (ROOT / "docs/cases.md").read_text(), re.MULTILINE):
        for name in re.findall(r"`([a-z_]+/test_\w+)`", rest):
            path = ROOT / "tests" / f"{name}.py"
            tags = re.findall(r"# case" + r": *(.*)", path.read_text()) if path.exists() else []
            if not any(case in tag.split(", ") for tag in tags):
                lacking.append(f"{case}: {name}")
    assert lacking == []


def test_no_two_areas_of_the_tests_have_a_module_of_one_name():
    """pytest puts every area on the path, so the first one imported would replace the other."""
    names = [
        path.stem
        for path in (ROOT / "tests").glob("*/*")
        if path.stem != "conftest" and (path.suffix == ".py" or any(path.glob("*.py")))
    ]
    assert {name for name in names if names.count(name) > 1} == set()
