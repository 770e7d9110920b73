#!/usr/bin/env python3
"""Score the detectors on the labelled public training logs in tests/data/corpus.

    python bench/score.py [--per-run] [--severity act|warn] [--jobs 2] [--out FILE]

The rule, in logged points: an event counts as found when a finding lies between `LEAD` points before its onset and its
recovery (without a recovery: `TAIL` points after the onset); a finding that an earlier event explains does not count
for the next. A finding outside every event is a false alarm, counted once in `MERGE` points. Minor events count as
events here, and an event extends `AFTER` points beyond its end (a minor one `AFTER_MINOR`), or to the end of a run that
never recovers. One-point outliers that heal by themselves are minor events: an alarm there is excused, and counted
separately. Delay is in points after the onset. Findings come from replay's own functions in this process, row by row,
so none can depend on a later row.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fp8watch.detect.pipeline import Pipeline
from fp8watch.replay.readers import csv_log

CORPUS = Path(__file__).parents[1] / "tests" / "data" / "corpus"
LEAD, TAIL, MERGE, AFTER, AFTER_MINOR = 10, 200, 50, 50, 10
HEALTHY = ("healthy", "healthy_noisy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of one run, or the sum of several."""

    found: int = 0
    events: int = 0
    false_alarms: int = 0
    points: int = 0
    outliers: int = 0
    outliers_acted: int = 0
    healthy: int = 0
    healthy_alarmed: int = 0
    delays: tuple[float, ...] = ()
    shares: tuple[float, ...] = field(default=())
    """Recall of each run that has events."""

    def __add__(self, other: Score) -> Score:
        return Score(**{name: getattr(self, name) + getattr(other, name) for name in Score.__slots__})

    @property
    def recall(self) -> float:
        return self.found / self.events if self.events else math.nan

    @property
    def false_per_10k(self) -> float:
        return 1e4 * self.false_alarms / self.points

    def as_json(self) -> dict[str, Any]:
        late = sorted(self.delays)
        return {
            "recall": round(self.recall, 3) if self.events else None,
            "recall_mean_of_runs": round(statistics.mean(self.shares), 3) if self.shares else None,
            "found": self.found,
            "events": self.events,
            "false_alarms": self.false_alarms,
            "points": self.points,
            "false_per_10k_points": round(self.false_per_10k, 3),
            "healthy_runs_alarmed": f"{self.healthy_alarmed}/{self.healthy}",
            "one_point_outliers_acted": f"{self.outliers_acted}/{self.outliers}",
            "median_delay_points": statistics.median(late) if late else None,
            "p90_delay_points": late[int(0.9 * (len(late) - 1))] if late else None,
        }


def unpack(folder: Path) -> list[dict[str, Any]]:
    """The labelled runs, with their logs unpacked into a folder (`path` of each)."""
    with tarfile.open(CORPUS / "logs.tar.xz") as archive:
        # Debian 12's Python 3.11.2 does not have extraction filters; the archive is our own.
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    runs: list[dict[str, Any]] = json.loads((CORPUS / "labels.json").read_text())["runs"]
    return [run | {"path": folder / run["file"]} for run in runs]


def source_of(run: dict[str, Any]) -> str:
    """Source of a run: the first word of its name. Versions of one benchmark are one source."""
    return str(run["file"]).split("_")[0].rstrip("0123456789")


def steps_of(path: Path) -> list[int]:
    """Every logged step."""
    return [sample.step for sample in csv_log.read(path).samples]


def findings(path: Path, severities: Iterable[str] = ("act",)) -> list[int]:
    """Steps of the findings of these severities."""
    pipeline, wanted = Pipeline("run"), frozenset(severities)
    return [
        finding.step
        for sample in csv_log.read(path).samples
        for finding in pipeline.observe(sample)
        if finding.severity in wanted
    ]


def stride_of(steps: Sequence[int]) -> float:
    """Steps between two logged points."""
    return statistics.median(b - a for a, b in itertools.pairwise(steps)) if len(steps) > 1 else 1.0


def score_run(run: dict[str, Any], fired: Iterable[int], *, points: int, stride: float) -> Score:
    """Score one run of `points` logged points; `fired` are the steps of its findings."""
    must, alarms = set(run["must_detect"]), sorted(set(fired))
    windows: list[tuple[float, float, float, float]] = []
    for event in run["events"]:
        onset, recovered, nan_step = event["onset"], event.get("recovered_step"), event.get("nan_step")
        end = onset + TAIL * stride if recovered is None else recovered
        end = end if nan_step is None else max(end, nan_step + TAIL * stride)
        after = (AFTER if onset in must else AFTER_MINOR) * stride
        windows.append((onset, onset - LEAD * stride, end, math.inf if recovered is None else end + after))
    windows.sort()
    delays = []
    for onset, start, end, _ in windows:
        if onset not in must:
            continue
        earlier = [(o, e) for o, _, e, _ in windows if o < onset]
        hits = [s for s in alarms if start <= s <= end and (s >= onset or not any(o <= s <= e for o, e in earlier))]
        delays.append((hits[0] - onset) / stride if hits else None)
    false, opened = 0, -math.inf
    for step in alarms:
        if not any(start <= step <= last for _, start, _, last in windows) and step - opened > MERGE * stride:
            false, opened = false + 1, step
    outliers = [event for event in run["events"] if event["type"] == "outlier"]
    acted = sum(any(e["onset"] <= s <= e.get("recovered_step", e["onset"]) for s in alarms) for e in outliers)
    known = tuple(delay for delay in delays if delay is not None)
    is_healthy = run["class"] in HEALTHY
    return Score(
        found=len(known), events=len(delays), false_alarms=false, points=points, outliers=len(outliers),
        outliers_acted=acted, healthy=int(is_healthy), healthy_alarmed=int(is_healthy and false > 0), delays=known,
        shares=(len(known) / len(delays),) if delays else (),
    )  # fmt: skip


def score_log(run: dict[str, Any], severities: Sequence[str] = ("act",)) -> Score:
    """Score one unpacked run."""
    steps = steps_of(run["path"])
    return score_run(run, findings(run["path"], severities), points=len(steps), stride=stride_of(steps))


def score_all(severities: Sequence[str] = ("act",), *, jobs: int = 2) -> list[tuple[dict[str, Any], Score]]:
    """Every run of the corpus with its score."""
    with tempfile.TemporaryDirectory(prefix="fp8watch-corpus-") as folder, ProcessPoolExecutor(jobs) as pool:
        runs = unpack(Path(folder))
        return list(zip(runs, pool.map(partial(score_log, severities=severities), runs), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-run", action="store_true")
    parser.add_argument("--severity", choices=("act", "warn"), default="act", help="warn counts both")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    scored = score_all(("act",) if chosen.severity == "act" else ("act", "warn"), jobs=chosen.jobs)
    total = sum((each for _, each in scored), Score())
    for run, each in scored:
        if chosen.per_run:
            late = [round(delay) for delay in each.delays]
            print(f"{run['file']:60} {each.found}/{each.events} found, {each.false_alarms} false, delays {late}")
    text = json.dumps(total.as_json(), indent=1)
    print(text)
    if chosen.out is not None:
        chosen.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
