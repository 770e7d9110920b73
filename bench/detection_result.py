"""bench/results/detection.json: the sections that several scripts write, each with its own command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from result_head import as_text, head

PATH = Path(__file__).parent / "results" / "detection.json"


def header(command: str) -> dict[str, Any]:
    """The fields that say where, when and of which commit."""
    return head(command, numpy=version("numpy"))


def merge(section: str, command: str, rows: Sequence[dict[str, Any]]) -> None:
    """Replace this script's rows, and keep those of the others."""
    report = json.loads(PATH.read_text()) if PATH.exists() else {}
    kept = [row for row in report.get("rows", []) if row["section"] != section]
    head = header(command)
    own = [{"section": section, "command": head["command"], **row} for row in rows]
    commands = sorted({row["command"] for row in [*kept, *own]})
    content = head | {"command": "; ".join(commands), "rows": [*kept, *own]}
    PATH.write_text(as_text(content))
