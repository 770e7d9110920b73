"""The end of the interpreter is told without a call of the loop's, and why it came."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
import fp8watch, fp8watch.training.assemble
from watched_training import RecordingChannel, Trainer
fp8watch.training.assemble.Channel = RecordingChannel
def close(self, timeout_seconds=2.0):
    print(self.sent[-1].reason, self.sent[-1].step)
RecordingChannel.close = close
trainer = Trainer()
watch = fp8watch.attach(trainer.model, trainer.optimizer)
trainer.steps(watch, 2)
{end}
"""


@pytest.mark.parametrize(
    ("end", "said"), [("", "end 2"), ("raise MemoryError('out')", "error: MemoryError 2"), ("sys.exit(3)", "end 2")]
)
def test_goodbye_without_detach(tmp_path, end, said):
    program = PROGRAM.format(folder=os.path.dirname(__file__), end=end)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FP8WATCH_REPORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.stdout.strip() == said, done.stderr
