"""From the rows of `bench/fault_trainer.py` to the figures of one fault, and what they are held against."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from typing import Any

from result_head import interval

BARS = {"inside_own_p999_ms": 5.0, "inside_cpu_mean_ms": 1.0, "step_ratio": 1.02, "frames_missing": 0}
BLOCK_SECONDS = 0.5
"""Steps are taken together in blocks: a mean holds every slow step, the median over blocks no other work's burst."""
Window = tuple[float, float]


def figures(rows: Sequence[Sequence[float]], on: Sequence[Window]) -> dict[str, Any]:
    """`rows`: as the trainer writes them; `on`: when the fault was on, in seconds of the machine's monotonic clock.

    Steps before the first window's beginning less one window's length are warm-up and do not count.
    """
    _, wall, own, inside_wall, inside_own, inside_cpu, is_paced = zip(*rows, strict=True)
    paced = [row for row in rows if row[-1]]
    return {
        "steps": len(rows),
        "inside_wall_p50_ms": share(inside_wall, 0.5), "inside_wall_p999_ms": share(inside_wall, 0.999),
        "inside_own_p50_ms": share(inside_own, 0.5), "inside_own_p999_ms": share(inside_own, 0.999),
        "inside_own_max_ms": share(inside_own, 1.0),
        "inside_cpu_mean_ms": round(1000 * statistics.fmean(inside_cpu), 3),
        "inside_cpu_p999_ms": share(inside_cpu, 0.999),
        "step_own_mean_ms": mean([time for time, waits in zip(own, is_paced, strict=True) if not waits]),
        "paced_step_own_mean_ms": mean([row[2] for row in paced]),
        "core_share": round(sum(own) / max(sum(wall), 1e-9), 3),
    } | ratio([row[0] for row in paced], [row[2] for row in paced], on)  # fmt: skip


def ratio(began: Sequence[float], own: Sequence[float], on: Sequence[Window]) -> dict[str, Any]:
    """Own time of a paced step while the fault is on over that while it is not, from blocks of the same run in turn."""
    blocks: dict[tuple[int, int], list[float]] = {}
    for at, seconds in zip(began, own, strict=True):
        window = sum(at >= edge for pair in on for edge in pair)
        blocks.setdefault((window, int(at / BLOCK_SECONDS)), []).append(seconds)
    means: dict[bool, list[float]] = {True: [], False: []}
    for (window, _), values in blocks.items():
        if len(values) >= 5:
            means[window % 2 == 1].append(statistics.fmean(values))
    if min(map(len, means.values())) < 3:
        return {"step_ratio": None, "step_ratio_ci95": None}
    off = statistics.median(means[False])
    ratios = [value / off for value in means[True]]
    return {
        "step_ratio": round(statistics.median(ratios), 4),
        "step_ratio_ci95": [round(value, 4) for value in interval(ratios)],
    }


def mean(seconds: Sequence[float]) -> float:
    """In milliseconds; 0 of none."""
    return round(1000 * statistics.fmean(seconds), 3) if seconds else 0.0


def share(values: Sequence[float], part: float) -> float:
    """Milliseconds that `part` of the values do not exceed."""
    return round(1000 * sorted(values)[min(len(values) - 1, int(part * len(values)))], 3)


def judge(row: dict[str, Any]) -> None:
    """Add `misses`, `not_measurable` and `pass` to a row.

    The ratio is met where its whole interval is. What is told by a clock is not measurable where more processes wanted
    a core than there are: then `pass` is null, neither yes nor no.
    """
    ratio_ci = row.get("step_ratio_ci95")
    by_clock = {
        "inside_own_p999_ms": row.get("inside_own_p999_ms", 99.0) <= BARS["inside_own_p999_ms"],
        "inside_cpu_mean_ms": row.get("inside_cpu_mean_ms", 99.0) <= BARS["inside_cpu_mean_ms"],
        "step_ratio": ratio_ci is not None and ratio_ci[1] <= BARS["step_ratio"],
    }
    checks = {
        "exit_code": row["exit_code"] == 0,
        "frames_missing": row["frames_missing"] <= row["frames_that_may_be_lost"],
        "recovered": row["recovered_seconds"] is not None,
        "errors": row["errors"] == 0,
        "metric": bool(row["metric"]) or not row["wants_metric"],
        "line": bool(row["line"]) or not row["wants_line"],
    }
    late = [name for name, is_met in by_clock.items() if not is_met]
    is_crowded = row["load"] > (os.cpu_count() or 1) + 1  # the trainer before this one is in it
    row["not_measurable"] = late if is_crowded else []
    row["misses"] = ([] if is_crowded else late) + [name for name, is_met in checks.items() if not is_met]
    row["pass"] = False if row["misses"] else None if row["not_measurable"] else True
