from __future__ import annotations

import math
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fp8watch.checkpoints import optimizer_state, rotation
from fp8watch.checkpoints.checksum import all_finite, parameter_checksum, sum_bits
from fp8watch.checkpoints.plain import to_plain
from fp8watch.checkpoints.targets import resume_candidates, rollback_target
from fp8watch.errors import CheckpointError
from fp8watch.records import CheckpointRecord


def record(step: int, label: str = "good", **more: Any) -> CheckpointRecord:
    values = {"run": "r", "attempt": 0, "checkpoint": f"c{step}", "step": step, "path": "", "label": label, **more}
    return CheckpointRecord(**values)


def test_the_target_lies_before_the_onset() -> None:
    # case: SPK-02
    records = [record(900), record(950), record(1000, "candidate")]
    target = rollback_target(records, onset_step=960)
    assert target is not None
    assert target.step == 950


def test_a_checkpoint_of_the_onset_step_itself_is_too_late() -> None:
    # case: SPK-02
    assert rollback_target([record(900), record(960)], onset_step=960) == record(900)
    assert rollback_target([record(960)], onset_step=960) is None


def test_good_goes_before_a_newer_candidate_and_tainted_never() -> None:
    records = [record(100), record(200, "candidate"), record(300, "tainted"), record(400, "pending")]
    assert rollback_target(records, 500) == record(100)
    assert rollback_target(records[1:], 500) == record(200, "candidate")
    assert rollback_target(records[2:], 500) is None
    assert rollback_target(records, 500, exclude=["c100"]) == record(200, "candidate")


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from(["pending", "candidate", "good", "tainted"]))), st.data())
def test_targets_are_usable_and_nothing_better_is_passed_over(rows: list[tuple[int, str]], data: st.DataObject) -> None:
    records = [record(step, label, checkpoint=str(index)) for index, (step, label) in enumerate(rows)]
    onset = data.draw(st.integers(0, 51))
    target = rollback_target(records, onset)
    before = [r for r in records if r.step < onset]
    good = [r for r in before if r.label == "good"]
    candidates = [r for r in before if r.label == "candidate"]
    if target is None:
        assert not good
        assert not candidates
    else:
        assert target.step == max(r.step for r in (good or candidates))
        assert target.label == ("good" if good else "candidate")
    assert all(r.label in ("good", "candidate") for r in resume_candidates(records))


@given(st.lists(st.sampled_from(["candidate", "good", "tainted"]), min_size=1, max_size=12), st.integers(1, 6))
def test_rotation_never_removes_the_newest_or_the_last_good(labels: list[str], keep: int) -> None:
    records = [record(step, label) for step, label in enumerate(labels)]
    gone = rotation.surplus(records, keep)
    left = [r for r in records if r not in gone]
    assert records[-1] in left
    good = [r for r in records if r.label == "good"]
    assert not good or good[-1] in left
    assert len(left) <= max(keep, 2)
    assert len(records) <= keep or len(gone) > 0 or len(records) <= 2


def test_plain_values_survive_weights_only(tmp_path: Path) -> None:
    value = {
        "array": np.arange(3),
        "number": np.float32(0.5),
        "tuple": (1, None, True, "x", b"y"),
        "counter": Counter({3: 1}),
        "ordered": OrderedDict(a=torch.ones(2)),
        7: {"nested": [torch.float16, torch.Size([2])]},
        "set": {1, 2},
    }
    plain = to_plain(value, "value")
    torch.save(plain, tmp_path / "x.pt")
    back = torch.load(tmp_path / "x.pt", weights_only=True)
    assert torch.equal(back["array"], torch.arange(3))
    assert back["number"] == 0.5
    assert back["tuple"] == value["tuple"]
    assert back["counter"] == Counter({3: 1})
    assert torch.equal(back["ordered"]["a"], torch.ones(2))
    assert back[7]["nested"] == [torch.float16, torch.Size([2])]
    assert back["set"] == {1, 2}


def test_module_versions_survive(tmp_path: Path) -> None:
    saved = to_plain(torch.nn.BatchNorm1d(2).state_dict(), "model")
    torch.save(saved, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt", weights_only=True)._metadata[""]["version"] == 2


@pytest.mark.parametrize("bad", [object(), len, Path("x"), {"a": [object()]}, type("Sub", (dict,), {})(a=1)])
def test_anything_else_is_named(bad: Any) -> None:
    with pytest.raises(CheckpointError, match="part"):
        to_plain({"part": bad}, "whole")


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=20), st.data())
def test_the_checksum_sees_one_bit_and_an_exchange(values: list[float], data: st.DataObject) -> None:
    tensor = torch.tensor(values)
    index = data.draw(st.integers(0, len(values) - 1))
    flipped = tensor.clone()
    flipped.view(torch.int32)[index] ^= 1 << data.draw(st.integers(0, 30))
    assert sum_bits([tensor]) != sum_bits([flipped])
    assert sum_bits([tensor]) == sum_bits([tensor.clone()])
    other = tensor + 1
    if not torch.equal(tensor, other):
        assert sum_bits([tensor, other]) != sum_bits([other, tensor])


def test_the_checksum_takes_every_dtype_and_an_empty_model() -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int8):
        assert len(sum_bits([torch.ones(3).to(dtype)])) == 16
    assert parameter_checksum(torch.nn.Identity()) == "0" * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e5m2])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_parameter_that_is_no_number_is_noticed(dtype: torch.dtype, bad: float) -> None:
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(torch.ones(7, 5).to(dtype)))
    model.register_parameter("none", nn.Parameter(torch.zeros(0)))
    assert all_finite(model)
    model.get_parameter("weight").data[3, 2] = torch.tensor(bad).to(dtype)
    assert not all_finite(model)


def test_an_optimizer_with_its_own_loading_is_asked_to_load() -> None:
    loaded: list[Any] = []

    class Own(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            loaded.append(state_dict)
            super().load_state_dict(state_dict)

    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = Own([parameter], lr=0.1, momentum=0.9)
    saved = optimizer.state_dict()
    optimizer_state.restore(optimizer, saved)
    assert loaded == [saved]


def test_lr_tensors_are_overwritten_in_place() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    lr = torch.tensor(0.5)
    optimizer = torch.optim.SGD([parameter], lr=lr)
    saved = optimizer.state_dict()
    saved = {"state": {}, "param_groups": [{**saved["param_groups"][0], "lr": torch.tensor(0.125)}]}
    optimizer_state.restore(optimizer, saved)
    assert optimizer.param_groups[0]["lr"] is lr
    assert float(lr) == 0.125
