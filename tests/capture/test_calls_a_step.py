"""Number of ATen calls in an ordinary step with delayed scaling, each of which is a kernel launch on a GPU.

Counted, not timed, on the double of Transformer Engine that `bench/step_cost.py` times.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_transport import keep_messages

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from step_cost import Calls, Training, attach, count

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Any:
    keep_messages(monkeypatch)
    for name in ("SHADOW_EVERY", "WHAT_IF_EVERY"):
        monkeypatch.setenv(f"FP8WATCH_{name}", "0")
    monkeypatch.setenv("FP8WATCH_STATISTICS_EVERY", "1000000")
    monkeypatch.setenv("FP8WATCH_REPORT", "0")
    training = Training(layers=2)
    training.step(None)
    bare = count(training, None)
    watch = attach(training, "calls")
    for _ in range(4):
        training.step(watch)
    yield training, watch, bare
    watch.detach()


def test_a_usual_step_makes_three_calls_whatever_the_number_of_tensors(trained):
    """A concatenation an update (the backward's on autograd's thread) and one of the step, its BF16 norm included."""
    training, watch, bare = trained
    for _ in range(3):
        calls = count(training, watch)
        ours = {name: n for name in set(calls) if (n := calls.count(name) - bare.count(name))}
        assert ours == {"aten.cat.default": 2, "aten.cat.out": 1}
    assert watch.failures == {}
    assert len(watch._recorder.layout.columns) == 2 * 26


def test_no_step_waits_for_a_device_nor_one_with_a_sample_of_the_update(trained):  # case: HOK-15
    training, watch, _ = trained
    for _ in range(12):
        with Calls() as mode:
            training.step(watch)
        assert not [name for name in mode.names if name.split(".")[1] in WAITS]


def test_a_counted_cast_makes_no_call_but_its_kernel():
    import step_cost

    with Calls() as mode:
        step_cost.measure_casts(casts=6)
    per_cast = len([name for name in mode.names if name.startswith("aten.")]) / (60 * 6)
    # Zeroing a buffer a step, and what is made once; slicing, reshaping and detaching would each make 60 * 6 more.
    assert per_cast < 1.0


def test_the_step_after_a_sample_is_as_cheap_as_any(trained):
    training, watch, bare = trained
    sampled = [len(count(training, watch)) - len(bare) for _ in range(21)]
    assert sorted(set(sampled)) == [3, max(sampled)]
    assert sampled.count(max(sampled)) == 2, "the update's size, one step in ten"
    assert max(sampled) < 16
    assert torch.is_grad_enabled()
