"""The detectors on labelled public training logs keep their score: recall, false alarms, healthy runs, delay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.score import MERGE, Score, findings, score_log, score_run, unpack

LONG = frozenset({
    "modded_1b_87bd.csv", "modded_50b_70a0.csv", "modded_adamw_124m.csv", "modded_muon_124m.csv",
    "modded_soap_124m.csv", "llmc_124m_hc.csv", "algoperf_imagenet_vit_jax_baseline_v05s_s3_t1.csv",
    "titan_dsv3_debug_bf16.csv", "algoperf_imagenet_resnet_jax_nadamw_sequential_v05s_s0_t1.csv",
})  # fmt: skip
"""Without an event to find, and long: bench/detection.py has them too."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return unpack(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def score(runs: list[dict[str, Any]]) -> Score:
    return sum((score_log(run) for run in runs if run["file"] not in LONG), Score())


def test_every_event_is_in_the_subset(runs: list[dict[str, Any]], score: Score) -> None:
    assert score.events == sum(len(run["must_detect"]) for run in runs) == 69
    assert score.points > 80_000


def test_recall(score: Score) -> None:
    print(score.as_json())
    assert score.recall >= 0.97
    assert score.as_json()["recall_mean_of_runs"] >= 0.95


def test_false_alarms(score: Score) -> None:
    assert score.false_per_10k <= 0.1
    assert score.healthy_alarmed == 0
    assert score.healthy >= 20


def test_outliers_that_heal_are_left_alone(score: Score) -> None:
    assert score.outliers >= 18
    assert score.outliers_acted <= 0.1 * score.outliers


def test_delay(score: Score) -> None:
    assert score.as_json()["median_delay_points"] <= 1
    assert score.as_json()["p90_delay_points"] <= 6


def test_what_is_found_is_known_when_its_row_is_the_last(runs: list[dict[str, Any]], tmp_path: Path) -> None:
    chosen = {
        "algoperf_wmt_jax_caspr_adaptive_v05e_s3_t4.csv",
        "algoperf_criteo1tb_jax_generalized_adam_v05e_s1_t1.csv",
    }
    for run in (run for run in runs if run["file"] in chosen):
        header, *rows = run["path"].read_text().splitlines(keepends=True)
        whole = findings(run["path"])
        assert whole
        for step in whole:
            last = next(i for i, row in enumerate(rows) if int(row.split(",")[0]) == step)
            prefix = tmp_path / "prefix.csv"
            prefix.write_text(header + "".join(rows[: last + 1]))
            assert findings(prefix) == [other for other in whole if other <= step]


EVENT = {"type": "spike", "onset": 500, "recovered_step": 520}
RUN = {"file": "a", "class": "spiky", "must_detect": [500], "events": [EVENT]}


@pytest.mark.parametrize(
    ("fired", "found", "false"),
    [
        ([], 0, 0),
        ([500], 1, 0),
        ([490], 1, 0),
        ([489], 0, 1),
        ([520], 1, 0),
        ([521], 0, 0),
        ([100, 100 + MERGE], 0, 1),
        ([100, 101 + MERGE], 0, 2),
        (list(range(1, 1001)), 1, 19),
    ],
)
def test_the_rule(fired: list[int], found: int, false: int) -> None:
    score = score_run(RUN, fired, points=1000, stride=1)
    assert (score.found, score.events, score.false_alarms) == (found, 1, false)


def test_an_alarm_in_a_healthy_run_counts() -> None:
    healthy = {"file": "a", "class": "healthy", "must_detect": [], "events": []}
    score = score_run(healthy, [7], points=10_000, stride=1)
    assert (score.healthy, score.healthy_alarmed, score.false_per_10k) == (1, 1, 1.0)
