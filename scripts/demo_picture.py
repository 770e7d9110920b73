"""Runs the demo and saves its last screen as docs/images/demo.svg, the picture in the README.

python scripts/demo_picture.py [SCENARIO]
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from fp8watch.demo.plan import make_plan
from fp8watch.demo.runner import run_plan
from fp8watch.demo.screen import closing_table, render

OUT = Path(__file__).resolve().parents[1] / "docs" / "images" / "demo.svg"


def main() -> None:
    """Run, draw, write."""
    scenario = sys.argv[1] if len(sys.argv) > 1 else "frozen-scale"
    plan = make_plan(
        scenario=scenario, policy="auto", steps=None, seed=0, fault_step=None, layer=None, device="cpu"
    )  # fmt: skip
    progress = run_plan(plan, with_unwatched=True)
    console = Console(record=True, width=118, force_terminal=True, file=io.StringIO())
    console.print(render(progress, width=118))
    console.print(closing_table(progress))
    picture = console.export_svg(title="make demo")
    # Without the web font: the picture must not fetch anything, and any monospaced font will do.
    OUT.write_text(re.sub(r"@font-face\s*{[^}]*}", "", picture))


if __name__ == "__main__":
    main()
