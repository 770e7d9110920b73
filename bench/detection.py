#!/usr/bin/env python3
"""What is found in the recorded runs, how early, and which cause is named.

    python bench/detection.py [--per-run]

Lead times: for every fault in precision or bookkeeping, the steps from the first finding to act on until the loss
leaves the healthy band. The upper edge of the band is the healthy twin's EMA(20) + 3 sigma of the pointwise difference
between the healthy seeds; the loss has left it after 5 points in a row above. Where the recording ends before that, the
lead is at least the number given (`is_censored`).

Confusion matrix: the cause of the first finding to act on since the fault, by true cause; `none`: nothing to act on was
found. A fault of family `outlier` heals by itself: the right answer is none. Held-out runs have other seeds, fault
steps and layers than those known while detectors and attribution were built.
Reads tests/data/recorded, writes its rows to bench/results/detection.json. Takes a minute on one core.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8watch.detect.pipeline import Pipeline
from fp8watch.records import Finding
from fp8watch.replay import frames_file

RECORDED = Path(__file__).parents[1] / "tests" / "data" / "recorded"
CAUSES = ("precision", "bookkeeping", "optimisation", "data", "hardware")
TRUTHS = (*CAUSES, "outlier", "none")
ANSWERS = (*CAUSES, "unknown", "none")
EARLY = frozenset({"precision", "bookkeeping"})
"""Causes that FP8's own numbers must show before the loss does."""
LEAD_BAR = {"gradient-underflow": 30}
EMA_STEPS, SIGMAS, POINTS_ABOVE, SIGMA_WINDOW = 20, 3.0, 5, 41
FROM_THE_START = frozenset({"short-warmup"})
"""Scenarios whose trouble begins before the noted step (the end of the warm-up)."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A recorded run and what the detectors find in it."""

    run: str
    scenario: str
    seed: int
    truth: str
    fault_step: int | None
    layer: str | None
    is_held_out: bool
    losses: tuple[float, ...]
    """Losses of step 1, 2, ..."""
    acts: tuple[Finding, ...]
    """Findings to act on since the fault."""
    early: tuple[Finding, ...]
    """Findings to act on before it: false alarms."""

    @property
    def answer(self) -> str:
        return self.acts[0].cause if self.acts else "none"

    @property
    def is_right(self) -> bool:
        return self.answer == ("none" if self.truth == "outlier" else self.truth)


def judge(recorded: frames_file.RecordedRun) -> Judged:
    """Replay one run."""
    facts = recorded.notes
    since = 1 if facts["scenario"] in FROM_THE_START else facts["fault_step"] or 1
    pipeline, losses, acts = Pipeline(recorded.run), [], []
    for sample in recorded.samples():
        losses.append(sample.scalars["loss"])
        acts += [finding for finding in pipeline.observe(sample) if finding.severity == "act"]
    assert not pipeline.failures, pipeline.failures
    return Judged(
        run=recorded.run, scenario=facts["scenario"], seed=facts["seed"], truth=facts["cause"] or "none",
        fault_step=facts["fault_step"], layer=facts["layer"], is_held_out=facts["held_out"], losses=tuple(losses),
        acts=tuple(finding for finding in acts if finding.step >= since),
        early=tuple(finding for finding in acts if finding.step < since),
    )  # fmt: skip


def judge_file(path: Path, scenarios: Iterable[str] | None = None) -> Iterator[Judged]:
    """All runs of a file, or those of some scenarios."""
    wanted = None if scenarios is None else frozenset(scenarios)
    for recorded in frames_file.load(path):
        if wanted is None or recorded.notes["scenario"] in wanted:
            yield judge(recorded)


def judge_all(folder: Path = RECORDED, scenarios: Iterable[str] | None = None) -> Iterator[Judged]:
    """All runs of all files, or those of some scenarios."""
    for path in sorted(folder.glob(f"*{frames_file.SUFFIX}")):
        yield from judge_file(path, scenarios)


def held_out_files(folder: Path = RECORDED) -> list[Path]:
    """Files of held-out seeds."""
    files = sorted(folder.glob(f"*{frames_file.SUFFIX}"))
    return [path for path in files if frames_file.load(path)[0].notes["held_out"]]


def band_top(twin: Sequence[float], healthy: Sequence[Sequence[float]]) -> Floats:
    """Upper edge of the healthy band per step; sigma is taken over `SIGMA_WINDOW` steps and all pairs of seeds."""
    steps = min(map(len, [twin, *healthy]))
    ema = np.empty(steps)
    for i, loss in enumerate(twin[:steps]):
        ema[i] = loss if i == 0 else ema[i - 1] + 2 / (EMA_STEPS + 1) * (loss - ema[i - 1])
    runs = np.array([losses[:steps] for losses in healthy])
    pairs = [(runs[a] - runs[b]) ** 2 for a in range(len(runs)) for b in range(a)]
    kernel = np.ones(SIGMA_WINDOW)
    variance = np.convolve(np.mean(pairs, axis=0), kernel, "same") / np.convolve(np.ones(steps), kernel, "same")
    return ema + SIGMAS * np.sqrt(variance)


def left_band(losses: Sequence[float], top: Floats, since: int) -> int | None:
    """Step of the fifth point in a row above the band from `since` on; None: it stays inside. NaN counts as above."""
    above = 0
    for step in range(since, min(len(losses), len(top)) + 1):
        above = above + 1 if not losses[step - 1] <= top[step - 1] else 0
        if above == POINTS_ABOVE:
            return step
    return None


def healthy_losses(folder: Path = RECORDED) -> dict[int, list[float]]:
    """Seed -> losses of its healthy run."""
    return {
        recorded.notes["seed"]: [frame.scalars["loss"] for frame in recorded.frames]
        for path in sorted(folder.glob(f"*{frames_file.SUFFIX}"))
        for recorded in frames_file.load(path)
        if recorded.notes["scenario"] == "healthy"
    }


def leads(judged: Sequence[Judged], healthy: Mapping[int, Sequence[float]]) -> list[dict[str, Any]]:
    """Lead times of the faults that must be found early; `healthy`: losses of the healthy run of each seed."""
    rows = []
    for each in judged:
        if each.truth not in EARLY or each.seed not in healthy:
            continue
        assert each.fault_step is not None
        left = left_band(each.losses, band_top(healthy[each.seed], list(healthy.values())), each.fault_step)
        found = each.acts[0].step if each.acts else None
        bar = LEAD_BAR.get(each.scenario)
        lead = None if found is None else (len(each.losses) + 1 if left is None else left) - found
        rows.append(
            {
                "name": f"lead {each.scenario}", "seed": each.seed, "cause": each.truth, "layer": each.layer,
                "fault_step": each.fault_step, "found_step": found,
                "detector": each.acts[0].detector if each.acts else None, "loss_left_band": left, "lead_steps": lead,
                "is_censored": left is None, "bar": bar, "pass": bar is None or (lead is not None and lead >= bar),
            }
        )  # fmt: skip
    return rows


def confusion(judged: Iterable[Judged]) -> dict[str, dict[str, int]]:
    """Truth -> answer -> runs."""
    counts = Counter((each.truth, each.answer) for each in judged)
    return {
        truth: {answer: counts[truth, answer] for answer in ANSWERS if counts[truth, answer]}
        for truth in TRUTHS
        if any(counts[truth, answer] for answer in ANSWERS)
    }


def rates(matrix: dict[str, dict[str, int]]) -> dict[str, dict[str, float | None]]:
    """Precision and recall of each cause."""
    result = {}
    for cause in CAUSES:
        right = matrix.get(cause, {}).get(cause, 0)
        named = sum(answers.get(cause, 0) for answers in matrix.values())
        real = sum(matrix.get(cause, {}).values())
        result[cause] = {
            "precision": round(right / named, 3) if named else None,
            "recall": round(right / real, 3) if real else None,
        }
    return result


def matrix_row(name: str, judged: Sequence[Judged]) -> dict[str, Any]:
    """One confusion matrix with the rates that follow from it."""
    faulty = [each for each in judged if each.truth != "none"]
    wrong = [each for each in judged if not each.is_right]
    return {
        "name": name, "runs": len(judged), "accuracy": round(sum(each.is_right for each in faulty) / len(faulty), 3),
        "named_wrongly": sum(each.answer not in ("unknown", "none") for each in wrong),
        "healthy_alarmed": sum(each.truth == "none" and bool(each.acts) for each in judged),
        "alarms_before_the_fault": sum(len(each.early) for each in judged),
        "matrix": confusion(judged), "rates": rates(confusion(judged)),
        "wrong": [f"{each.run}: {each.truth}, given {each.answer}" for each in wrong],
    }  # fmt: skip


def main() -> int:
    import detection_result
    from score import Score, score_all

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-run", action="store_true")
    chosen = parser.parse_args()
    judged = list(judge_all())
    for each in judged if chosen.per_run else []:
        seen = [(finding.step, finding.detector, finding.cause) for finding in (*each.early, *each.acts)]
        print(f"{each.run:26} fault {each.fault_step} {each.truth}: {seen}")
    early = leads(judged, healthy_losses())
    for row in early:
        print(f"{row['name']:26} seed {row['seed']} found {row['found_step']} left {row['loss_left_band']} "
              f"lead {row['lead_steps']}{'+' if row['is_censored'] else ''}")  # fmt: skip
    total = sum((score for _, score in score_all()), Score()).as_json()
    bars = {"recall": 0.97, "false_per_10k_points": 0.1, "recall_mean_of_runs": 0.95, "healthy_runs_alarmed": 0}
    is_good = total["recall"] >= 0.97 and total["false_per_10k_points"] <= 0.1 and total["recall_mean_of_runs"] >= 0.95
    is_good = is_good and total["healthy_runs_alarmed"].startswith("0/")
    rows = [
        {"name": "public logs", **total, "bar": bars, "pass": is_good},
        matrix_row("causes, held-out runs", [each for each in judged if each.is_held_out]),
        matrix_row("causes, all runs", judged),
        *early,
    ]  # fmt: skip
    for row in rows[:3]:
        print(row)
    detection_result.merge("detection", "bench/detection.py", rows)
    return 0 if all(row.get("pass", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
