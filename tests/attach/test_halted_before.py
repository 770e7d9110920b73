"""A run that was halted before does not end without a word when it is started again, nor do ranks that come apart."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp8watch.controller import markers
from fp8watch.errors import RanksApart
from fp8watch.training.agreement.base import MustStop
from fp8watch.training.assemble import _stopping

PROGRAM = """
import torch, fp8watch
model = torch.nn.Linear(2, 2)
watch = fp8watch.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), run="doomed")
print("trains")
watch.detach()
"""


def start(home: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"FP8WATCH_DIR": str(home), "XDG_RUNTIME_DIR": str(home.parent)}
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_starting_a_halted_run_again_says_why_and_what_lets_it_go_on(tmp_path: Path) -> None:
    markers.write_halted(tmp_path / "home", "doomed", reason="the loss is not finite", step=7, time_unix=1.0)
    ended = start(tmp_path / "home")
    assert (ended.returncode, ended.stdout) == (78, "")
    assert ended.stderr == (
        "fp8watch: run doomed was halted before (the loss is not finite); nothing is trained. "
        "To start it again: fp8watch runs release doomed\n"
    )
    assert markers.release(tmp_path / "home", "doomed")
    assert start(tmp_path / "home").stdout == "trains\n"


@pytest.mark.parametrize("content", ["", "[]", "{}", "\xff"])
def test_a_marker_that_cannot_be_read_still_halts_with_a_word(content: str, tmp_path: Path) -> None:
    path = markers.write_halted(tmp_path / "home", "doomed", reason="x", step=7, time_unix=1.0)
    path.write_text(content, encoding="latin-1")
    ended = start(tmp_path / "home")
    assert ended.returncode == 78
    assert ended.stderr.startswith("fp8watch: run doomed was halted before; nothing is trained.")


def test_ranks_that_come_apart_inside_an_optimizer_step_say_so(caplog: pytest.LogCaptureFixture) -> None:
    class Session:
        step = 12

    with pytest.raises(RanksApart), _stopping(Session()):  # type: ignore[arg-type]
        raise MustStop("rank 3 does not answer")
    (said,) = caplog.records
    assert (said.levelno, "rank 3 does not answer" in said.message) == (logging.ERROR, True)
