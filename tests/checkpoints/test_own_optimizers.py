"""Copies of a model whose optimizers keep state of their own: each rank has its own back, equal ones are saved once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranked_runs import Ranks, name_of

from fp8watch.checkpoints import contents, manifest, storage
from fp8watch.checkpoints.checksum import sum_each, sum_nested
from fp8watch.checkpoints.restore import Unfit
from fp8watch.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("copies")


def moments(run: Any) -> list[Any]:
    return [value.tolist() for state in run.optimizer.state.values() for value in state.values()]


def apart(ranks: Ranks) -> None:
    """What distributed Muon or a ZeRO made by hand does: parameters are the same, moments are not."""
    for rank, run in enumerate(ranks):
        for index, parameter in enumerate(run.model.parameters()):
            if index % 2 != rank:
                run.optimizer.state[parameter]["exp_avg"].zero_()


def optimizer_files(root: Path) -> list[str]:
    return sorted(name for name in manifest.read(root / name_of(2)).files if name.startswith("optimizer"))


def restore(ranks: Ranks) -> None:
    for run in ranks:
        loaded = run.manager.load(name_of(2), allow_without_data=False)
        run.manager.put_back(loaded, skip_batches=0, refused={})


def test_each_rank_has_its_own_moments_back(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.step(2)
    apart(ranks)
    before = [moments(run) for run in ranks]
    assert before[0] != before[1]
    ranks.save(2)
    assert len(optimizer_files(tmp_path)) == 2
    ranks.step(1)
    restore(ranks)
    assert [moments(run) for run in ranks] == before


def test_optimizers_that_hold_other_parameters_have_their_own_back(tmp_path: Path) -> None:
    """Each rank's optimizer was given a part of the parameters only."""
    ranks = Ranks(tmp_path)
    for rank, run in enumerate(ranks):
        own = [p for index, p in enumerate(run.model.parameters()) if index % 2 == rank]
        run.optimizer = run.parts.optimizer = torch.optim.SGD(own, lr=1e-3, momentum=0.9)
        inputs = torch.randn(8, 4)
        (run.model(inputs) - inputs).square().mean().backward()
        run.optimizer.step()
        with torch.no_grad():
            for parameter, first in zip(run.model.parameters(), ranks.runs[0].model.parameters(), strict=True):
                parameter.copy_(first)  # as they are sent round
    before = [moments(run) for run in ranks]
    ranks.save(2)
    for run in ranks:
        for state in run.optimizer.state.values():
            state["momentum_buffer"].zero_()
    restore(ranks)
    assert [moments(run) for run in ranks] == before


def test_equal_ones_are_saved_once_whoever_comes_first(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 3)
    ranks.step(2)
    for rank in (2, 0, 1):
        ranks.runs[rank].manager.save(2)
    ranks.runs[0].manager.poll()
    found = manifest.read(tmp_path / name_of(2))
    (file,) = optimizer_files(tmp_path)
    assert [part.optimizer_file for part in found.ranks] == [file] * 3
    assert [file in part.files for part in found.ranks] == [False, False, True]
    before = [moments(run) for run in ranks]
    ranks.step(1)
    restore(ranks)
    assert [moments(run) for run in ranks] == before


def test_ranks_that_differ_in_a_learning_rate_keep_their_own(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.step(2)
    ranks.runs[1].optimizer.param_groups[0]["lr"] = 0.5
    ranks.save(2)
    for run in ranks:
        run.optimizer.param_groups[0]["lr"] = 0.1
    restore(ranks)
    assert [run.optimizer.param_groups[0]["lr"] for run in ranks] == [1e-2, 0.5]


# case: CKP-16
@pytest.mark.parametrize("here", [1, 3])
def test_another_number_of_ranks_is_refused_with_the_reason(tmp_path: Path, here: int) -> None:
    ranks = Ranks(tmp_path)
    ranks.step(2)
    apart(ranks)
    ranks.save(2)
    for run in Ranks(tmp_path, here):
        with pytest.raises(
            Unfit, match=f"each of 2 ranks had optimizer state of its own, which cannot be assigned to {here} ranks"
        ):
            run.manager.load(name_of(2), allow_without_data=True)
    assert ranks.runs[0].manager.records()[0].label == "candidate"


def test_a_state_that_its_writer_could_not_write_makes_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 came first and ran out of room in it; rank 0 relied on it."""
    ranks = Ranks(tmp_path)
    ranks.step(2)
    real = storage.torch.save

    def full(content: Any, file: Any) -> None:
        if "param_groups" in content:
            raise OSError(28, "No space left on device")
        real(content, file)

    with monkeypatch.context() as patch:
        patch.setattr(storage.torch, "save", full)
        with pytest.raises(CheckpointError, match="No space left"):
            ranks.runs[1].manager.save(2)
    with pytest.raises(CheckpointError, match="rank 1 could not save"):
        ranks.runs[0].manager.save(2)
    assert ranks.runs[0].manager.records() == []


def test_a_file_of_that_name_that_nobody_wrote_makes_no_checkpoint(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.step(2)
    ranks.runs[1].manager.save(2)
    (folder,) = tmp_path.glob(".unfinished-*")
    (file,) = folder.glob("optimizer-*.pt")
    part = folder / "part-00001.json"
    part.write_bytes(part.read_bytes().replace(f'"{file.name}":'.encode(), b'"something-else.pt":'))
    with pytest.raises(CheckpointError, match=r"nobody wrote optimizer-\w+\.pt, a file of rank 0"):
        ranks.runs[0].manager.save(2)


def test_tensors_that_cannot_be_summed_up_are_each_ranks_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(value: Any) -> str:
        raise NotImplementedError("aten::view of this kind of tensor")

    monkeypatch.setattr(contents, "sum_nested", odd)
    ranks = Ranks(tmp_path)
    ranks.step(2)
    before = [moments(run) for run in ranks]
    ranks.save(2)
    assert optimizer_files(tmp_path) == ["optimizer-00000.pt", "optimizer-00001.pt"]
    ranks.step(1)
    restore(ranks)
    assert [moments(run) for run in ranks] == before


def test_the_sum_of_a_state_tells_all_that_differs() -> None:
    state: dict[str, Any] = {"state": {0: {"m": torch.ones(4), "step": torch.tensor(3.0)}}, "groups": [{"lr": 0.1}]}
    others: list[dict[str, Any]] = [
        {"state": {0: {"m": torch.ones(2, 2), "step": torch.tensor(3.0)}}, "groups": [{"lr": 0.1}]},
        {"state": {0: {"m": torch.ones(4).double(), "step": torch.tensor(3.0)}}, "groups": [{"lr": 0.1}]},
        {"state": {0: {"m": torch.ones(4), "step": torch.tensor(4.0)}}, "groups": [{"lr": 0.1}]},
        {"state": {1: {"m": torch.ones(4), "step": torch.tensor(3.0)}}, "groups": [{"lr": 0.1}]},
        {"state": {0: {"m": torch.ones(4), "step": torch.tensor(3.0)}}, "groups": [{"lr": 0.2}]},
        {"state": {0: {"m": [torch.ones(4)], "step": torch.tensor(3.0)}}, "groups": [{"lr": 0.1}]},
    ]
    assert sum_nested(state) == sum_nested({**state})
    assert len({sum_nested(state), *map(sum_nested, others)}) == 1 + len(others)
    assert len(set(sum_each([torch.zeros(0), torch.zeros(1), torch.zeros(2), torch.ones(1)]))) == 4
