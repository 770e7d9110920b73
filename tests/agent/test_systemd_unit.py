"""The systemd unit starts a command that exists with options that exist, and asks for no rights it does not need."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer.main

from fp8watch_agent.cli import app

UNIT = Path(__file__).resolve().parents[2] / "agent" / "fp8watch-agent.service"


def service() -> configparser.SectionProxy:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNIT)
    return parser["Service"]


def test_the_command_exists_with_its_options() -> None:
    words = shlex.split(service()["ExecStart"])
    assert words[:3] == ["/usr/bin/env", "fp8watch", "agent"]
    context = typer.main.get_command(app).make_context("agent", words[3:], resilient_parsing=False)
    assert context.params["socket"] == "unix:///run/fp8watch/agent.sock"
    assert str(context.params["directory"]) == "/var/lib/fp8watch"


def test_it_comes_back_and_has_no_rights() -> None:
    unit = service()
    assert unit["Restart"] == "always"
    assert unit["User"] != "root"
    assert unit["NoNewPrivileges"] == "yes"
    assert unit["CapabilityBoundingSet"] == ""
    assert int(unit["TimeoutStopSec"]) >= 10, "what is left is sent or spooled"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="not on this machine: systemd-analyze")
def test_systemd_finds_nothing_wrong_with_it() -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(UNIT)], capture_output=True, text=True, timeout=60, check=False
    )
    ours = [line for line in done.stderr.splitlines() if UNIT.name in line and "Failed to" not in line]
    assert not [line for line in ours if "Unknown" in line or "Invalid" in line or "ignoring" in line], ours
