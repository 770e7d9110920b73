"""The console's charts as Plotly figures: loss with findings and actions, and head-room by tensor and step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from fp8watch import action_words
from fp8watch.records import ActionRecord, Finding
from fp8watch_dashboards.queries import evidence_text
from fp8watch_dashboards.timeline import StepPoint, Timeline

MAX_COLUMNS = 220
"""Most columns of the heat map; beyond that, several steps share a column, which shows the worst of them."""
MAX_ROWS = 64
"""Most rows of the heat map; beyond that, the tensors of a block share one row per tensor class."""
APPLIED_SIZE, NOT_APPLIED_SIZE = 13, 22
"""Size of the stars in pixels: an open one stays visible around a filled one at the same place."""
MAX_NAMED = 12
"""Number of actions named on the loss chart: the newest ones."""
HEADROOM_RANGE = (-8.0, 24.0)
"""Range of the colours, in powers of two: 24 is the head-room at a scale that is too small by 2^-24."""

LINE = "#2f6fde"
ABANDONED = "#8d95a3"
SEVERITY = {"warn": "#e8a317", "act": "#d62f3f"}
ACTION = "#7b3fc4"
GRID = "rgba(128,136,150,0.18)"
BF16 = "#c9ced6"


def _colours() -> list[tuple[float, str]]:
    """Red where a tensor clips, green where the scale fits, blue where range is wasted.

    Delayed scaling works at the edge of 0: in healthy runs, too, an amax a few per cent above its history clips a few
    elements. So just below 0 the colour is sand, and red begins where values are cut to half.
    """
    low, high = HEADROOM_RANGE
    stops = [(low, "#6b0016"), (-4.0, "#b3122a"), (-1.0, "#e2574c"), (-0.5, "#f0a45d"), (-1e-6, "#f3e2a9"),
             (0.0, "#2c9d74"), (3.0, "#8fd0a5"), (7.0, "#dcefe0"), (12.0, "#a9c8ee"), (high, "#1c3f94")]  # fmt: skip
    return [((value - low) / (high - low), colour) for value, colour in stops]


def loss_figure(
    timeline: Timeline, findings: Sequence[Finding], actions: Sequence[ActionRecord], *, is_log: bool = False
) -> go.Figure:
    """Loss by step. Traces: one per surviving attempt, abandoned steps (grey), non-finite losses, findings, actions."""
    figure = go.Figure()
    for attempt, group in groupby(timeline.points, key=lambda point: point.attempt):
        points = list(group)
        kept = [point for point in points if timeline.survives(point)]
        lost = [point for point in points if not timeline.survives(point)]
        if lost:
            _line(figure, kept[-1:] + lost, f"attempt {attempt}, abandoned", colour=ABANDONED, width=1.2)
        if kept:
            _line(figure, kept, f"attempt {attempt}", colour=LINE, width=1.8)
    _not_finite(figure, timeline.points)
    height = _Heights(timeline)
    for severity in ("warn", "act"):
        _findings(figure, [f for f in findings if f.severity == severity], height, severity)
    done = [a for a in actions if a.applied_step is not None]
    _actions(figure, done, height, name="action done", symbol="star", size=APPLIED_SIZE)
    # A skipped rung is only a step or two from the next one, which is done: draw its star on top and around that one.
    rest = [a for a in actions if a.applied_step is None]
    _actions(figure, rest, height, name="action not done", symbol="star-open", size=NOT_APPLIED_SIZE)
    _milestones(figure, findings, actions)
    _style(figure, timeline, height=400)
    figure.update_yaxes(title="loss", type="log" if is_log else "linear")
    return figure


def headroom_figure(timeline: Timeline, points: Sequence[StepPoint], block: str | None = None) -> go.Figure:
    """Smallest head-room by tensor (rows) and step (columns) over `points`, which are some or all of the timeline's.

    Empty cells were not observed; grey cells ran only in BF16. Values outside the colour range get the colour at its
    end. `block` restricts the figure to one block.
    """
    points = sorted(points, key=lambda point: point.step)
    names, rows = _grouped_rows(timeline.tensors, block)
    edges = _columns(points)
    steps = [f"{chunk[0].step}" if len(chunk) == 1 else f"{chunk[0].step} to {chunk[-1].step}" for chunk in edges]
    cells, bf16 = _cells(edges, rows, len(names))
    centres = [(chunk[0].step + chunk[-1].step) / 2 for chunk in edges]
    figure = go.Figure()
    if bf16.any():
        _heat(figure, centres, names, np.where(bf16, 0.0, np.nan), steps, name="BF16")
        figure.data[-1].update(colorscale=[(0, BF16), (1, BF16)], showscale=False, hovertemplate="%{y}<br>ran in BF16")
    _heat(figure, centres, names, np.clip(cells, *HEADROOM_RANGE), steps, name="head-room")
    low, high = HEADROOM_RANGE
    figure.data[-1].update(
        colorscale=_colours(),
        zmin=low,
        zmax=high,
        colorbar={
            "title": {"text": "bits", "side": "right"},
            "tickvals": [-8, -4, 0, 4, 8, 16, 24],
            "thickness": 12,
            "outlinewidth": 0,
        },
        hovertemplate="%{y}<br>step %{customdata}<br>head-room %{z:.2f} bits<extra></extra>",
    )
    row_pixels = 12 if len(names) <= MAX_ROWS else max(4, MAX_ROWS * 12 // len(names))
    _style(figure, timeline, height=max(220, 70 + row_pixels * len(names)))
    every = -(-12 // row_pixels)
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False, tickfont={"size": 9}, dtick=every)
    _block_lines(figure, timeline, names, block)
    return figure


def _line(figure: go.Figure, points: list[StepPoint], name: str, *, colour: str, width: float) -> None:
    figure.add_scatter(
        x=[point.step for point in points],
        y=[point.loss if point.loss is not None and math.isfinite(point.loss) else None for point in points],
        name=name,
        mode="lines",
        connectgaps=False,
        line={"color": colour, "width": width},
        hovertemplate="step %{x}<br>loss %{y:.4f}<extra>" + name + "</extra>",
    )


def _not_finite(figure: go.Figure, points: list[StepPoint]) -> None:
    """A NaN or infinite loss has no place on the axis: draw a cross where the line breaks."""
    last: float | None = None
    x, y = [], []
    for point in points:
        if point.loss is None:
            continue
        if math.isfinite(point.loss):
            last = point.loss
        elif last is not None:
            x.append(point.step)
            y.append(last)
    if x:
        figure.add_scatter(
            x=x,
            y=y,
            name="loss not finite",
            mode="markers",
            marker={"symbol": "x", "size": 8, "color": SEVERITY["act"]},
            hovertemplate="step %{x}<br>loss not finite<extra></extra>",
        )


class _Heights:
    """Where on the loss axis a mark is drawn: at the loss of its attempt and step, or of the nearest step."""

    def __init__(self, timeline: Timeline) -> None:
        finite = [p for p in timeline.points if p.loss is not None and math.isfinite(p.loss)]
        self._by_attempt: dict[int, tuple[npt.NDArray[np.int64], list[float]]] = {}
        for attempt, group in groupby(finite, key=lambda point: point.attempt):
            points = list(group)
            steps = np.array([point.step for point in points])
            self._by_attempt[attempt] = (steps, [float(point.loss or 0.0) for point in points])

    def at(self, attempt: int, step: int) -> float | None:
        """Loss at which to draw a mark; None if there is no finite loss at all."""
        steps, losses = self._by_attempt.get(attempt) or next(iter(self._by_attempt.values()), (None, []))
        if steps is None:
            return None
        return losses[int(np.abs(steps - step).argmin())]


def _findings(figure: go.Figure, findings: list[Finding], heights: _Heights, severity: str) -> None:
    if not findings:
        return
    figure.add_scatter(
        x=[finding.step for finding in findings],
        y=[heights.at(finding.attempt, finding.step) for finding in findings],
        name=f"finding ({severity})",
        mode="markers",
        marker={
            "symbol": "triangle-down",
            "size": 12,
            "color": SEVERITY[severity],
            "line": {"color": "white", "width": 1},
        },
        customdata=[_finding_text(finding) for finding in findings],
        hovertemplate="step %{x}: %{customdata}<extra></extra>",
    )


def _finding_text(finding: Finding) -> str:
    where = finding.tensor or finding.layer or "run"
    return (
        f"{finding.detector} ({finding.cause}), since step {finding.onset_step}<br>{where}<br>"
        f"{evidence_text(finding.evidence)}"
    )


def _actions(
    figure: go.Figure, actions: Iterable[ActionRecord], heights: _Heights, *, name: str, symbol: str, size: int
) -> None:
    actions = list(actions)
    if not actions:
        return
    steps = [action.decided_step if action.applied_step is None else action.applied_step for action in actions]
    figure.add_scatter(
        x=steps,
        y=[heights.at(action.attempt, step) for action, step in zip(actions, steps, strict=True)],
        name=name,
        mode="markers",
        marker={"symbol": symbol, "size": size, "color": ACTION, "line": {"color": ACTION, "width": 1.5}},
        customdata=[_action_text(action) for action in actions],
        hovertemplate="step %{x}: %{customdata}<extra></extra>",
    )


def _action_text(action: ActionRecord) -> str:
    """Worded as in `fp8watch actions list`."""
    read_back = action_words.read_back(action)
    parts = [action_words.state(action), read_back and f"read back {read_back}", action_words.effect(action)]
    return f"{action.action} by rule {action.rule}<br>{', '.join(filter(None, parts))}<br>{action.reason}"


def _milestones(figure: go.Figure, findings: Sequence[Finding], actions: Sequence[ActionRecord]) -> None:
    """Thin lines over the whole height: at the onsets of `act` findings, and at the newest applied actions, named."""
    for onset in sorted({finding.onset_step for finding in findings if finding.severity == "act"})[-MAX_NAMED:]:
        figure.add_vline(x=onset, line={"color": SEVERITY["act"], "width": 1, "dash": "dot"}, opacity=0.7)
    applied = sorted((a.applied_step, a.action) for a in actions if a.applied_step is not None)[-MAX_NAMED:]
    for index, (step, name) in enumerate(applied):
        figure.add_vline(x=step, line={"color": ACTION, "width": 1}, opacity=0.35)
        figure.add_annotation(
            x=step,
            y=1.0 - 0.07 * (index % 3),
            yref="paper",
            text=name,
            showarrow=False,
            xanchor="left",
            xshift=4,
            font={"size": 11, "color": ACTION},
        )


def _grouped_rows(tensors: list[tuple[str, str]], block: str | None) -> tuple[list[str], npt.NDArray[np.intp]]:
    """The names of the rows, and the row of every tensor (-1: not drawn)."""
    shown = [(tensor if block in (None, tensor[0]) else None) for tensor in tensors]
    num_shown = sum(1 for item in shown if item)
    names: dict[str, int] = {}
    rows = np.full(len(tensors), -1, dtype=np.intp)
    for index, item in enumerate(shown):
        if item is None:
            continue
        owner, name = item
        label = name if num_shown <= MAX_ROWS else f"block {owner}:{name.rpartition(':')[2]}"
        rows[index] = names.setdefault(label, len(names))
    return list(names), rows


def _columns(points: list[StepPoint]) -> list[list[StepPoint]]:
    """The points in at most `MAX_COLUMNS` groups of equal spans of steps, without spans that have no point."""
    if not points:
        return []
    first, last = points[0].step, points[-1].step
    span = max(1, -(-(last - first + 1) // MAX_COLUMNS))
    return [list(group) for _, group in groupby(points, key=lambda point: (point.step - first) // span)]


def _cells(
    columns: list[list[StepPoint]], rows: npt.NDArray[np.intp], num_rows: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Smallest head-room of every (row, column), NaN where nothing was observed; and where only BF16 ran."""
    cells = np.full((num_rows, len(columns)), np.nan, dtype=np.float32)
    bf16 = np.zeros((num_rows, len(columns)), dtype=np.bool_)
    drawn = rows >= 0
    for index, points in enumerate(columns):
        for point in points:
            np.fmin.at(cells[:, index], rows[drawn], point.headroom[drawn])
            bf16[rows[drawn & point.in_bf16], index] = True
    return cells, bf16 & np.isnan(cells)


def _heat(
    figure: go.Figure, x: list[float], y: list[str], z: npt.NDArray[np.floating], steps: list[str], *, name: str
) -> None:
    figure.add_heatmap(
        x=x, y=y, z=np.round(z.astype(np.float32), 2), name=name, hoverongaps=False, customdata=[steps] * len(y)
    )


def _block_lines(figure: go.Figure, timeline: Timeline, names: list[str], block: str | None) -> None:
    """A thin line between blocks."""
    if block is not None:
        return
    owner = {name: own for own, name in timeline.tensors}
    owners = [owner.get(name, name.partition(":")[0]) for name in names]
    for index in range(1, len(names)):
        if owners[index] != owners[index - 1]:
            figure.add_hline(y=index - 0.5, line={"color": "white", "width": 3 if len(names) <= MAX_ROWS else 1})


def _style(figure: go.Figure, timeline: Timeline, *, height: int) -> None:
    figure.update_layout(
        height=height,
        margin={"l": 170, "r": 100, "t": 10, "b": 36},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        hovermode="closest",
        uirevision="keep",
    )
    figure.update_xaxes(
        title="step", range=[timeline.first_step - 0.5, timeline.last_step + 0.5], gridcolor=GRID, zeroline=False
    )
    figure.update_yaxes(gridcolor=GRID, zeroline=False)
