"""What is said about damaged checkpoints: each thing once, and every line says that it is fp8watch's."""

from __future__ import annotations

import logging
from collections import Counter

from watched_training import Trainer

import fp8watch


def test_each_is_said_once_and_as_ours(tmp_path, channel, caplog):
    folder = tmp_path / "ckpt"
    for steps in (6, 0):
        trainer = Trainer()
        saves = fp8watch.Checkpoints(folder, every=2, keep=3)
        watch = fp8watch.attach(trainer.model, trainer.optimizer, run="r", policy="auto", checkpoints=saves)
        if steps:
            trainer.steps(watch, steps)
            watch.detach()
            saved = sorted(path for path in folder.iterdir() if path.name.startswith("step-"))
            assert len(saved) == 3
            (saved[0] / "manifest.json").write_text("{")
            file = saved[2] / "model.pt"
            file.write_bytes(file.read_bytes()[:100])
            (folder / "ledger.json").unlink()
            (folder / ".ledger-copy.json").unlink()
            caplog.clear()
    assert watch.resume() == 4
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert sum("left aside: " in text for text in said) == 1
    assert sum("checkpoint refused: " in text for text in said) == 1
    assert all(text.startswith("fp8watch: ") for text in said), said
    assert max(Counter(text.removeprefix("fp8watch: ") for text in said).values()) == 1
    watch.detach()
