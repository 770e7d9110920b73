"""`fp8watch demo`: trains a small real GPT in FP8, breaks it, and shows how fp8watch saves it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fp8watch.demo.config import Device
from fp8watch.demo.engines.choice import choose
from fp8watch.demo.plan import MIN_STEPS, Plan, make_plan
from fp8watch.demo.runner import TrainingFailed, run_plan
from fp8watch.demo.scenarios.catalogue import SCENARIOS
from fp8watch.errors import EXIT_BAD_INPUT, BadInput

EXIT_BROKEN = 1
FAMILY_WIDTH = 100
"""Columns of a terminal in which `--list` shows each fault's family too."""


def demo(
    scenario: Annotated[str, typer.Option(help="Fault to inject; see --list.")] = "frozen-scale",
    policy: Annotated[str, typer.Option(help="observe, auto, or a policy file.")] = "auto",
    steps: Annotated[
        int | None, typer.Option(min=MIN_STEPS, max=1_000_000, help="Optimizer steps (default: 400).")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of model and data.")] = 0,
    fault_step: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="Step in which the fault begins (default: half-way).")
    ] = None,
    layer: Annotated[str | None, typer.Option(help="Layer of the fault, for scenarios that take one.")] = None,
    device: Annotated[
        str, typer.Option(help="cpu: FP8 is emulated; cuda: Transformer Engine, or emulated without it.")
    ] = "cpu",
    with_unwatched: Annotated[
        bool | None,
        typer.Option(
            "--with-unwatched/--without-unwatched", help="Train the faulty run unwatched too (not in --json)."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="No screen; the last line is one JSON object.")] = False,
    list_scenarios: Annotated[bool, typer.Option("--list", help="List the scenarios and exit.")] = False,
) -> None:
    """Train a small GPT in FP8 with a fault, watched, beside its healthy twin."""
    if list_scenarios:
        _list(as_json)
        return
    try:
        chosen = _device(device)
        fp8 = choose(chosen)
        plan = make_plan(
            scenario=scenario, policy=policy, steps=steps, seed=seed, fault_step=fault_step, layer=layer,
            device=chosen, engine=fp8.engine,
        )  # fmt: skip
    except BadInput as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(EXIT_BAD_INPUT) from None
    if fp8.told:
        typer.echo(fp8.told, err=True)
    unwatched = not as_json if with_unwatched is None else with_unwatched
    try:
        _run_json(plan, unwatched) if as_json else _run_screen(plan, unwatched)
    except TrainingFailed as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(EXIT_BROKEN) from None


def _device(name: str) -> Device:
    if name == "cpu":
        return "cpu"
    if name != "cuda":
        raise BadInput([f"command line:1: --device: {name!r} is neither cpu nor cuda"])
    import torch

    if not torch.cuda.is_available():
        raise BadInput(["command line:1: --device: torch sees no CUDA device here"])
    return "cuda"


def _list(as_json: bool) -> None:
    if as_json:
        rows = [
            {"scenario": s.name, "family": s.family, "summary": s.summary, "recurs": s.recurs, "layer": s.layer,
             "takes_layer": s.takes_layer, "takes_fault_step": s.takes_fault_step}
            for s in SCENARIOS.values()
        ]  # fmt: skip
        typer.echo(json.dumps(rows))
        return
    console = Console()
    has_family = console.width >= FAMILY_WIDTH  # else the explanation needs its room
    table = Table(box=None, pad_edge=False)
    for name in ("scenario", "what goes wrong", *(["family"] if has_family else []), "--layer"):
        table.add_column(name, no_wrap=name != "what goes wrong")
    for scenario in SCENARIOS.values():
        layer = (scenario.layer or "all") if scenario.takes_layer else "-"
        family = [scenario.family] if has_family else []
        table.add_row(scenario.name, scenario.summary, *family, layer)
    console.print(table)


def _run_json(plan: Plan, with_unwatched: bool) -> None:
    from fp8watch.demo import result

    progress = run_plan(plan, with_unwatched=with_unwatched)
    line = result.as_json(
        plan,
        progress.story,
        watched=progress.watched,
        twin=progress.twin,
        unwatched=progress.unwatched,
        ended=progress.ended,
    )
    typer.echo(json.dumps(line, allow_nan=False))


def _run_screen(plan: Plan, with_unwatched: bool) -> None:
    from fp8watch.demo.screen import Screen, closing_table

    console = Console()
    with Screen(console) as screen:
        progress = run_plan(plan, with_unwatched=with_unwatched, listener=screen)
    console.print(closing_table(progress))
    program = _program()
    console.print("look further:")
    console.print(f"  {program} console")
    if progress.story.store is not None:
        console.print(f"  {program} replay {escape(str(progress.story.store))}", soft_wrap=True)


def _program() -> str:
    """What a person types to call this program again: after `make demo` it is not on the PATH."""
    ours = Path(sys.executable).with_name("fp8watch")
    if shutil.which("fp8watch") == str(ours) or not ours.exists():
        return "fp8watch"
    return os.path.relpath(ours) if ours.is_relative_to(Path.cwd()) else str(ours)
