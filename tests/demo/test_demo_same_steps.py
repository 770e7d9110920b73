"""Losses shown side by side are means of the same steps, in lines, legend and table, and the screen says so."""

from __future__ import annotations

import io
import re

from rich.console import Console

from fp8watch.demo.plan import make_plan
from fp8watch.demo.processes import FINAL_STEPS, Losses
from fp8watch.demo.runner import Progress
from fp8watch.demo.screen import Screen, closing_table, losses_line, render

STEPS = 400


def run(last_step: int, above: float = 0.0) -> Losses:
    """A loss that falls by 0.01 a step, so that a mean tells its steps."""
    made = Losses()
    for step in range(1, last_step + 1):
        made.add(step, 10.0 - 0.01 * step + above)
    return made


def progress(watched: int, twin: int, unwatched: int | None) -> Progress:
    plan = make_plan(
        scenario="frozen-scale", policy="auto", steps=STEPS, seed=0, fault_step=None, layer=None, device="cpu"
    )  # fmt: skip
    other = None if unwatched is None else run(unwatched)
    return Progress(plan=plan, watched=run(watched), twin=run(twin), unwatched=other)


def printed(*states: Progress) -> str:
    out = io.StringIO()
    with Screen(Console(file=out, width=100)) as screen:
        for state in states:
            screen(state)
    return out.getvalue()


def shown(what: object) -> str:
    console = Console(record=True, width=110, file=io.StringIO())
    console.print(what)
    return console.export_text()


def test_runs_of_different_speed_are_compared_at_the_step_that_is_named() -> None:
    assert printed(progress(230, 290, 190)) == printed(progress(150, 150, 150)), "one has not got to step 200"
    lines = printed(progress(230, 290, 190), progress(260, 330, 220)).splitlines()
    assert [line.split(":")[0] for line in lines] == [f"step 100 of {STEPS}", f"step 200 of {STEPS}"]
    mean = 10.0 - 0.01 * (200 - (FINAL_STEPS - 1) / 2)
    assert lines[1].count(f"{mean:.3f}") == 3
    assert lines[1].endswith("(means of steps 181 to 200)")


def test_a_quarter_before_twenty_steps_says_how_many_there_were() -> None:
    assert losses_line(progress(8, 8, None), 5) == "this run 9.970, healthy twin 9.970 (means of steps 1 to 5)"
    assert losses_line(progress(0, 8, None), 0).startswith("this run -, healthy twin -")


def test_the_legend_of_the_last_screen_has_the_tables_numbers() -> None:
    state = progress(STEPS, STEPS, STEPS)
    legend, table = shown(render(state, width=110)), shown(closing_table(state))
    numbers = re.findall(r"(?:this run|healthy twin|unwatched) (\d\.\d{3})", legend)
    assert len(numbers) == 3
    assert numbers == re.findall(r"loss, [a-z ]+│ (\d\.\d{3})", table)
    assert "means of steps 381 to 400" in legend
    assert "means of steps 381 to 400" in table


def test_the_legend_names_the_step_that_all_runs_have_reached() -> None:
    legend = shown(render(progress(230, 290, 190), width=110))
    assert "means of steps 171 to 190" in legend
    assert legend.count(f"{10.0 - 0.01 * 180.5:.3f}") == 3
