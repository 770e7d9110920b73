"""`fp8watch metrics`: the catalogue, not live values."""

from __future__ import annotations

import dataclasses

from fp8watch.commands.output import print_json, print_table
from fp8watch.commands.stores import JsonOption


def command(as_json: JsonOption = False) -> None:
    """Print the metric catalogue: full name, type, labels, unit, help."""
    from fp8watch.metrics import CATALOGUE

    if as_json:
        print_json([dataclasses.asdict(metric) for metric in CATALOGUE])
        return
    rows = [(m.name, m.kind, ", ".join(m.labels), m.unit, m.help) for m in CATALOGUE]
    print_table("Metrics", ["name", "type", "labels", "unit", "help"], rows)
