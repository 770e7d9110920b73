"""Curves in a terminal: braille cells, two dots wide and four high, one colour per curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

# Bit of each dot of a braille cell, by column and row (Unicode, block U+2800).
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_LABEL_WIDTH = 7
MAX_VALUE = 1e6
"""Losses above it are not drawn, like those that are not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """(step, value) in order of steps, and rich's name of a colour. Later curves are drawn on top."""

    points: Sequence[tuple[int, float]]
    colour: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """A vertical line at a step."""

    step: int
    colour: str


def plot(curves: Sequence[Curve], *, last_step: int, width: int, height: int, markers: Sequence[Marker] = ()) -> Text:
    """Draw steps 1 to `last_step` in `width` x `height` cells, including the labels of the value axis."""
    columns, rows = max(8, width - _LABEL_WIDTH), max(2, height)
    binned = [_binned(curve.points, last_step, columns * 2) for curve in curves]
    values = [value for bins in binned for value in bins if value is not None]
    low, high = _range(values)
    cells = [[0] * columns for _ in range(rows)]
    colours = [[""] * columns for _ in range(rows)]
    for marker in markers:
        column = min(columns - 1, int((marker.step - 1) / max(1, last_step) * columns))
        for row in range(rows):
            cells[row][column] = 0x47
            colours[row][column] = marker.colour
    for curve, bins in zip(curves, binned, strict=True):
        for x, value in enumerate(bins):
            if value is None:
                continue
            share = min(1.0, max(0.0, (value - low) / (high - low)))
            y = round((1.0 - share) * (rows * 4 - 1))
            if colours[y // 4][x // 2] != curve.colour:
                cells[y // 4][x // 2] = 0
                colours[y // 4][x // 2] = curve.colour
            cells[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
    return _assemble(cells, colours, low, high)


def _binned(points: Sequence[tuple[int, float]], last_step: int, num_bins: int) -> list[float | None]:
    """Mean of the drawable values in each bin; None where there are none."""
    sums, counts = [0.0] * num_bins, [0] * num_bins
    for step, value in points:
        if abs(value) < MAX_VALUE:
            index = min(num_bins - 1, int((step - 1) / max(1, last_step) * num_bins))
            sums[index] += value
            counts[index] += 1
    return [total / count if count else None for total, count in zip(sums, counts, strict=True)]


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Range of all values except the highest twentieth, which is the start of training."""
    if not values:
        return 0.0, 1.0
    ordered = sorted(values)
    low, high = ordered[0], ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]
    room = max(0.05 * (high - low), 1e-3, 1e-6 * abs(high))
    return low - room, high + room


def _assemble(cells: list[list[int]], colours: list[list[str]], low: float, high: float) -> Text:
    text = Text(no_wrap=True)
    for index, (row, row_colours) in enumerate(zip(cells, colours, strict=True)):
        value = high - (high - low) * index / max(1, len(cells) - 1)
        text.append(f"{value:5.2f} |" if index % 3 == 0 or index == len(cells) - 1 else "      |", "dim")
        for cell, colour in zip(row, row_colours, strict=True):
            text.append(chr(0x2800 + cell), colour or None)
        text.append("\n" if index < len(cells) - 1 else "")
    return text
