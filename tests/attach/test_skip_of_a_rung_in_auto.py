"""Ranks skip a non-finite update by themselves only for a rung in auto, and only as often as that rung says."""

from __future__ import annotations

import math

import pytest
import torch

import fp8watch

TEXT = """version: 1
mode: auto
rules:
  - name: a
    when: {{detector: nonfinite}}
    ladder:
{rungs}"""


@pytest.mark.parametrize(
    ("rungs", "skipped"),
    [
        (["action: skip_update, max_consecutive: 2"], 2),
        (["action: skip_update, max_consecutive: 2, mode: observe"], 0),
        (["action: skip_update, max_consecutive: 1, mode: observe", "action: skip_update, max_consecutive: 2"], 2),
    ],
)
def test_only_what_acts_is_armed(rungs: list[str], skipped: int, trainer, channel) -> None:
    text = TEXT.format(rungs="".join(f"      - {{{rung}}}\n" for rung in rungs))
    watch = fp8watch.attach(trainer.model, trainer.optimizer, policy=text)
    parameter = next(trainer.model.parameters())
    num_skipped = 0
    for _ in range(4):
        loss = trainer.loss()
        loss.backward()
        parameter.grad.view(-1)[0] = math.nan
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        watch.step(loss)
        num_skipped += bool(torch.isfinite(parameter).all())
    assert num_skipped == skipped
