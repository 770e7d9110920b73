"""The benchmark's alternating blocks: a sampled step is always a timed one, and every group holds as many."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import capture_blocks

from fp8watch.capture.governor import Governor


class Training:
    def step(self, watch: Any) -> None:
        if watch is not None:
            watch.num_steps += 1


class Watch:
    num_steps = 0

    def detach(self) -> None:
        pass


@pytest.mark.parametrize(
    ("steps", "lead", "group", "every"), [(2, 1, 10, 15), (5, 0, 2, 10), (5, 1, 2, 12)],
    ids=["launch-bound", "gpu-bound", "with lead"],
)  # fmt: skip
def test_one_timed_step_in_ten_is_sampled_at_the_same_places_of_each_group(
    monkeypatch: pytest.MonkeyPatch, steps: int, lead: int, group: int, every: int
) -> None:
    governor = Governor({"statistics": every}, budget=None)
    sampled: list[list[bool]] = []
    """Of each watched block, whether its timed steps are."""

    def block(training: Any, watch: Watch | None, lead: int, steps: int) -> float:
        if watch is None:
            return 1.0
        first = watch.num_steps + lead + 1
        for _ in range(lead + steps):
            training.step(watch)
        untimed = range(first - lead, first)
        assert not any(governor.due("statistics", step) for step in untimed)
        sampled.append([governor.due("statistics", step) for step in range(first, first + steps)])
        return 1.0

    monkeypatch.setattr(capture_blocks, "block", block)
    times = capture_blocks.alternate(
        (Training(), Training()), lambda training: Watch(), steps=steps, lead=lead, pairs=6, group=group
    )  # fmt: skip
    assert len(times["bare"]) == len(times["watched"]) == 6 * group
    groups = [sampled[i : i + group] for i in range(0, len(sampled), group)]
    assert all(one == groups[0] for one in groups)
    assert sum(map(sum, groups[0])) * 10 == group * steps
