"""The live screen: three losses, what was found, what was done; and the table at the end."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fp8watch.demo import words
from fp8watch.demo.plot import Curve, Marker, plot
from fp8watch.demo.processes import FINAL_STEPS, Losses
from fp8watch.demo.runner import Progress
from fp8watch.records import ActionRecord, Finding

RUN, TWIN, UNWATCHED, FAULT = "bright_green", "bright_blue", "red", "yellow"
PLOT_ROWS = 14
MAX_LINES = 10
SMOOTHING = 0.2
"""Weight of the newest loss in the drawn moving mean: single batches differ by 5 %."""


_VERBS = {"sent": "orders", "waiting": "asks", "proposed": "would"}
"""Status of an action that was not done (yet) -> first word of its line."""


class Screen:
    """Context manager; call it with every `Progress`. Without a terminal it prints lines as things happen."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_live = console.is_terminal
        self._live = Live(console=console, refresh_per_second=2, transient=False)
        self._said: set[str] = set()

    def __enter__(self) -> Screen:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_live:
            self._live.stop()

    def __call__(self, progress: Progress) -> None:
        """Show the progress."""
        if self._is_live:
            self._live.update(render(progress, width=self._console.width))
            return
        steps = progress.plan.watched.config.steps
        lines = [f"step {step} of {steps}: {losses_line(progress, step)}" for step in _quarters(progress, steps)]
        for line in [*lines, *story_lines(progress)]:
            # A rollback changes the losses of a quarter that was already printed; it is printed only once.
            key = line.split(":")[0] if line in lines else line
            if key not in self._said:
                self._said.add(key)
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _quarters(progress: Progress, steps: int) -> list[int]:
    """The quarters that all runs have completed: losses of different steps cannot be compared."""
    reached = _common_step(progress)
    return [step for step in range(max(1, steps // 4), steps + 1, max(1, steps // 4)) if reached >= step]


def _common_step(progress: Progress) -> int:
    """The newest step that every run has reached."""
    return min(losses.last_step for _, losses, _ in _runs(progress))


def render(progress: Progress, *, width: int) -> Panel:
    """The whole screen."""
    plan = progress.plan
    steps = plan.watched.config.steps
    curves = [Curve(points=_smoothed(progress.twin), colour=TWIN)]
    if progress.unwatched is not None:
        curves.append(Curve(points=_smoothed(progress.unwatched), colour=UNWATCHED))
    curves.append(Curve(points=_smoothed(progress.watched), colour=RUN))
    markers = [] if plan.fault_step is None else [Marker(step=plan.fault_step, colour=FAULT)]
    chart = plot(curves, last_step=steps, width=width - 4, height=PLOT_ROWS, markers=markers)
    legend = Text()
    step = _common_step(progress)
    for name, losses, colour in _runs(progress):
        legend.append(f"--- {name} {_mean(losses, step)}   ", colour)
    if plan.fault_step is not None:
        legend.append(f"| fault at step {plan.fault_step}", FAULT)
    legend.append(f"\nlosses: {_window(step)}", "dim")
    lines = story_lines(progress, with_warnings=False)[-MAX_LINES:]
    num_warnings = sum(finding.severity == "warn" for finding in progress.story.findings)
    lines.append(f"{num_warnings} warnings, on which nobody acts" if num_warnings else "")
    story = Text("\n".join(lines), no_wrap=True, overflow="ellipsis")
    title = f"fp8watch demo: {plan.scenario.name}, step {progress.watched.last_step} of {steps}"
    about = Text(f"{plan.scenario.summary}; seed {plan.watched.config.seed}, policy {plan.policy}", overflow="fold")
    return Panel(Group(about, chart, legend, Text(), story), title=escape(title), title_align="left")


def _runs(progress: Progress) -> list[tuple[str, Losses, str]]:
    rows = [("this run", progress.watched, RUN), ("healthy twin", progress.twin, TWIN)]
    if progress.unwatched is not None:
        rows.append(("unwatched", progress.unwatched, UNWATCHED))
    return rows


def _smoothed(losses: Losses) -> list[tuple[int, float]]:
    mean: float | None = None
    smooth = []
    for step, loss in losses.series():
        mean = loss if mean is None or mean != mean else mean + SMOOTHING * (loss - mean)
        smooth.append((step, mean))
    return smooth


def _mean(losses: Losses, step: int) -> str:
    mean = losses.mean(step)
    return "-" if mean is None else f"{mean:.3f}"


def _window(step: int) -> str:
    """The steps that the shown losses are means of: the same for all runs, in the table too."""
    first = max(1, step - FINAL_STEPS + 1)
    return f"means of steps {first} to {step}" if step else "no step yet"


def losses_line(progress: Progress, step: int) -> str:
    """Every run's loss at this step, as one line."""
    means = ", ".join(f"{name} {_mean(losses, step)}" for name, losses, _ in _runs(progress))
    return f"{means} ({_window(step)})"


def story_lines(progress: Progress, *, with_warnings: bool = True) -> list[str]:
    """Findings and actions in order of their steps."""
    story = progress.story
    lines = [
        (finding.step, 0, f"found   {words.finding_line(finding, with_evidence=with_warnings)}")
        for finding in story.findings
        if with_warnings or finding.severity == "act"
    ]
    for action in story.actions:
        verb = "did" if action.applied_step is not None else _VERBS.get(action.status, "not")
        lines.append((action.applied_step or action.decided_step, 1, f"{verb:8}{words.action_line(action)}"))
    return [line for _, _, line in sorted(lines, key=lambda entry: entry[:2])]


def closing_table(progress: Progress) -> Table:
    """Fault, onset, found after, cause, action, losses."""
    plan, story = progress.plan, progress.story
    steps = plan.watched.config.steps
    first = _first_of_fault(story.findings, plan.fault_step)
    table = Table(title=f"fp8watch demo: {plan.scenario.name}", show_header=False, title_justify="left")
    table.caption, table.caption_justify = f"losses: {_window(steps)}", "left"
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    since = "" if plan.fault_step is None else f"from step {plan.fault_step}: "
    table.add_row("fault", since + plan.scenario.summary)
    table.add_row("onset", "nothing found" if first is None else f"step {first.onset_step}")
    found = "-"
    if first is not None:
        delay = first.step - (plan.fault_step if plan.fault_step is not None else first.onset_step)
        place = first.tensor or first.layer or "loss and gradients"
        found = f"{delay} step{'' if delay == 1 else 's'}, by {first.detector} in {place}"
    table.add_row("found after", found)
    table.add_row("cause", "-" if first is None else f"{first.cause}: {words.evidence(first.evidence)}")
    table.add_row("action", _actions(story.applied, story.proposed))
    names = {"this run": "loss, this run", "healthy twin": "loss, healthy twin", "unwatched": "loss, unwatched"}
    twin = progress.twin.final(steps)
    for name, losses, _ in _runs(progress):
        table.add_row(names[name], _final(losses.final(steps), twin if name != "healthy twin" else None))
    return table


def _first_of_fault(findings: Sequence[Finding], fault_step: int | None) -> Finding | None:
    act = [finding for finding in findings if finding.severity == "act"]
    after = [finding for finding in act if fault_step is None or finding.step >= fault_step]
    return (after or act or [None])[0]  # type: ignore[list-item]


def _actions(applied: Sequence[ActionRecord], proposed: Sequence[ActionRecord]) -> str:
    lines = [words.action_line(action) for action in applied]
    lines += [f"only proposed: {words.action_line(action)}" for action in proposed if action.mode != "auto"]
    return "\n".join(lines) or "none"


def _final(loss: float | None, twin: float | None) -> str:
    if loss is None:
        return "not finite"
    compared = f"  ({(loss / twin - 1) * 100:+z.1f} % against the twin)" if twin else ""
    return f"{loss:.3f}{compared}"
