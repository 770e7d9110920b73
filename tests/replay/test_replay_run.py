"""replay: causal, one JSON object a line, and honest about bad rows and filtered series."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fp8watch.replay.run import replay

RNG = np.random.default_rng(0)
LOSS = 3.0 * (1 + 0.01 * RNG.standard_normal(300))
LOSS[150:170] *= 2
LOSS[200] *= 1.5
LOSS[250] = math.nan
ROWS = [f"{i + 1},{loss}" for i, loss in enumerate(LOSS)]


def run(path: Path, text: str, **more: object) -> tuple[int, list[dict], str]:
    path.write_text(text)
    out, err = io.StringIO(), io.StringIO()
    code = replay([path], out=out, err=err, **more)  # type: ignore[arg-type]
    return code, [json.loads(line) for line in out.getvalue().splitlines()], err.getvalue()


def test_what_is_printed(tmp_path: Path) -> None:
    code, lines, _ = run(tmp_path / "run.csv", "step,loss\n" + "\n".join(ROWS))
    assert code == 0
    assert [(x["detector"], x["severity"], x["step"], x["onset_step"]) for x in lines] == [
        ("loss_spike", "warn", 151, 151),
        ("loss_spike", "act", 153, 151),
        ("loss_spike", "warn", 201, 201),
        ("nonfinite", "act", 251, 251),
    ]
    keys = {"run", "step", "onset_step", "detector", "severity", "cause", "tensor", "layer", "rank", "evidence"}
    assert all(keys <= set(line) for line in lines)


def test_a_log_says_that_it_may_be_filtered(tmp_path: Path) -> None:  # case: SPK-12
    _, lines, err = run(tmp_path / "run.csv", "step,loss\n" + "\n".join(ROWS))
    assert "may have repaired" in err
    assert all(line["evidence"]["series"] == "may be filtered" for line in lines)


@settings(max_examples=20, deadline=None)
@given(cut=st.integers(1, 300))
def test_a_prefix_of_the_run_gives_a_prefix_of_the_findings(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("prefix") / "run.csv"
    _, whole, _ = run(path, "step,loss\n" + "\n".join(ROWS))
    _, part, _ = run(path, "step,loss\n" + "\n".join(ROWS[:cut]))
    assert part == [line for line in whole if line["step"] <= cut]


def test_a_bad_row_ends_the_run_after_what_was_found_before_it(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.csv", tmp_path / "bad.csv"
    good.write_text("step,loss\n" + "\n".join(ROWS))
    bad.write_text("step,loss\n" + "\n".join([*ROWS[:160], "161,oops", *ROWS[161:]]))
    out, err = io.StringIO(), io.StringIO()
    assert replay([bad, tmp_path / "none.csv", good], out=out, err=err) == 2
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [x["step"] for x in lines if x["run"] == "bad"] == [151, 153]
    assert len([x for x in lines if x["run"] == "good"]) == 4
    assert f"{bad}:162: loss: 'oops' is not a number" in err.getvalue()
    assert f"{tmp_path / 'none.csv'}:1: path: no such file" in err.getvalue()


def test_a_table_for_people(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_text("step,loss\n" + "\n".join(ROWS))
    out = io.StringIO()
    assert replay([path], out_format="table", out=out, err=io.StringIO()) == 0
    assert "nonfinite" in out.getvalue()


def test_the_command_with_a_policy_prints_what_it_would_propose(tmp_path: Path) -> None:
    import typer

    from fp8watch.replay.cli import command

    app = typer.Typer()
    app.command()(command)
    path, policy = tmp_path / "run.csv", tmp_path / "policy.yaml"
    path.write_text("step,loss\n" + "\n".join(ROWS))
    policy.write_text(
        "version: 1\nmode: auto\nrules:\n  - name: not-finite\n    when: {detector: nonfinite, severity: act}\n"
        "    ladder:\n      - {action: halt}\n"
    )
    result = CliRunner().invoke(app, [str(path), "--policy", str(policy), "--format", "jsonl"])
    assert result.exit_code == 0, result.output
    actions = [json.loads(line) for line in result.stdout.splitlines() if '"action"' in line]
    assert [(x["action"], x["step"], x["rule"]) for x in actions] == [("halt", 251, "not-finite")]
    policy.write_text("version: 1\nmode: sometimes\n")
    assert CliRunner().invoke(app, [str(path), "--policy", str(policy)]).exit_code == 2
