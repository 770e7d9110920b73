"""Bad input to attach ends a training that does not care with exit code 2, every error said, and nothing started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys, torch, fp8watch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    fp8watch.attach(model, optimizer, policy="bad.yaml")
except Exception as error:
    if "caught" in sys.argv:
        print(type(error).__mro__[1].__name__, len(error.problems))
        sys.exit(0)
    raise
finally:
    print("torn down")
"""
BAD = """version: 1
mode: loud
rules:
  - name: x
    when: {detector: nonsense}
    ladder: [{action: rollback, skip_batches: -1}]
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "bad.yaml").write_text(BAD)
    environment = os.environ | {"FP8WATCH_DIR": str(folder / "home"), "XDG_RUNTIME_DIR": str(folder)}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_exit_code_2_and_every_error_without_a_traceback(tmp_path: Path) -> None:
    ended = run(tmp_path)
    assert ended.returncode == 2
    assert ended.stdout == "torn down\n"
    lines = ended.stderr.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["bad.yaml:2", "bad.yaml:5", "bad.yaml:6"]
    assert all(len(line.split(": ")) >= 3 for line in lines), "file:line: field: reason"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.yaml"], "nothing was started"


def test_it_can_be_caught(tmp_path: Path) -> None:
    ended = run(tmp_path, "caught")
    assert (ended.returncode, ended.stdout) == (0, "BadInput 3\ntorn down\n")
