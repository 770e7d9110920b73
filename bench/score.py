#!/usr/bin/env python3
"""Score the detectors on a folder of labelled training logs, in this process.

usage: bench/score.py CORPUS SCORER [--per-run] [--severity act|warn] [--out FILE]

CORPUS holds *.csv and labels.json; SCORER is the corpus' own score.py, whose `score_run` and rules are used as
they are. The same through the command line, with its check for look-ahead, slower:
SCORER CORPUS --command "fp8watch replay --format jsonl {file}".
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from fp8watch.detect.pipeline import Pipeline
from fp8watch.replay.readers import csv_log


def findings(path: Path) -> list[tuple[int, str, str, int]]:
    pipeline = Pipeline("run")
    found = []
    for sample in csv_log.read(path).samples:
        for finding in pipeline.observe(sample):
            found.append((finding.step, finding.severity, finding.detector, finding.onset_step))
    return found


def load_scorer(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("corpus_score", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def score(corpus: Path, scorer: Any, severities: set[str], *, verbose: bool) -> dict[str, Any]:
    runs = sorted(json.loads((corpus / "labels.json").read_text())["runs"], key=lambda run: run["file"])
    paths = [corpus / Path(run["file"]).name for run in runs]
    with ProcessPoolExecutor(2) as pool:
        everything = list(pool.map(findings, paths))
    found = events = false = points = clean = clean_false = outliers = acted = 0
    delays: list[float] = []
    shares: list[float] = []
    by_source: dict[str, list[int]] = {}
    for run, path, seen in zip(runs, paths, everything, strict=True):
        steps, _, _ = scorer.read_log(path)
        fired = [step for step, severity, _, _ in seen if severity in severities]
        hit, wanted, late, wrong, length = scorer.score_run(run, steps, fired)
        found, events, false, points, delays = (
            found + hit,
            events + wanted,
            false + wrong,
            points + length,
            delays + late,
        )
        shares += [hit / wanted] if wanted else []
        source = by_source.setdefault(path.stem.split("_")[0], [0, 0, 0, 0])
        for i, value in enumerate((hit, wanted, wrong, length)):
            source[i] += value
        for event in (item for item in run.get("events", []) if item["type"] == "outlier"):
            outliers += 1
            last = event.get("recovered_step") or event["onset"]
            acted += any(event["onset"] <= step <= last for step in fired)
        if run["class"] in ("healthy", "healthy_noisy"):
            clean, clean_false = clean + 1, clean_false + bool(wrong)
        if verbose and (hit < wanted or wrong or any(d > 6 for d in late)):
            print(f"{path.stem:52s} found {hit}/{wanted} false {wrong} delays {[round(d) for d in late]}")
            print("    ", [item for item in seen if item[1] in severities][:40])
    leave_out = {
        name: round((found - s[0]) / (events - s[1]), 3) for name, s in by_source.items() if s[1] and events > s[1]
    }
    return {
        "recall": round(found / events, 3),
        "recall_mean_of_runs": round(statistics.mean(shares), 3),
        "found": found,
        "events": events,
        "false_alarms": false,
        "false_per_10k_points": round(1e4 * false / points, 3),
        "healthy_runs_alarmed": f"{clean_false}/{clean}",
        "one_point_outliers_alarmed": f"{acted}/{outliers}",
        "median_delay_points": statistics.median(delays),
        "p90_delay_points": sorted(delays)[int(0.9 * (len(delays) - 1))],
        "recall_without_source": leave_out,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("scorer", type=Path)
    parser.add_argument("--per-run", action="store_true")
    parser.add_argument("--severity", choices=("act", "warn"), default="act")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    severities = {"act"} if args.severity == "act" else {"act", "warn"}
    result = score(args.corpus, load_scorer(args.scorer), severities, verbose=args.per_run)
    text = json.dumps(result, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
