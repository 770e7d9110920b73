"""What attach says of the place of the records: this process's folder, or the node's agent's."""

from __future__ import annotations

import pytest

import fp8watch

AGENT = "unix:///run/fp8watch/agent.sock"


@pytest.mark.parametrize("agent", [None, AGENT])
def test_records_are_said_to_be_where_they_are(agent, trainer, channel, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("FP8WATCH_REPORT", "1")
    if agent is not None:
        monkeypatch.setenv("FP8WATCH_AGENT", agent)
    fp8watch.attach(trainer.model, trainer.optimizer, run="r")
    said = capfd.readouterr().err
    folder = tmp_path / "fp8watch" / "runs" / "r"
    assert (f"records in {folder}" in said) == (agent is None)
    assert (f"records with the agent at {AGENT}" in said) == (agent is not None)
    assert (f"in {folder}: journal and lock" in said) == (agent is not None)
