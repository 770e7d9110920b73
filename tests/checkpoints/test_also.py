"""What attach was given as `also=` goes into checkpoints and comes back from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plain_run import PlainRun
from ranked_runs import Ranks, name_of
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fp8watch.checkpoints import manifest
from fp8watch.checkpoints.restore import PartlyRestored, Unfit
from fp8watch.errors import CheckpointError


class Counter:
    def __init__(self) -> None:
        self.count, self.seen = 0, [torch.zeros(2)]

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.seen = state["count"], state["seen"]


def give(run: PlainRun) -> dict[str, Any]:
    """An average, a second model with an optimizer of its own, and a counter."""
    other = torch.nn.Linear(4, 4)
    run.parts.also = {
        "ema": AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9)), "critic": other,
        "critic_optimizer": torch.optim.AdamW(other.parameters(), lr=1e-2), "counter": Counter(),
    }  # fmt: skip
    return dict(run.parts.also)


def step(run: PlainRun, *, bad: bool = False) -> None:
    also: Any = run.parts.also
    run.step()
    if bad:
        with torch.no_grad():
            run.model.first.weight.fill_(float("nan"))
    also["ema"].update_parameters(run.model)
    also["critic"](torch.ones(1, 4)).square().sum().backward()
    also["critic_optimizer"].step()
    also["critic_optimizer"].zero_grad()
    also["counter"].count += 1
    also["counter"].seen[0] += 1


def bits(run: PlainRun) -> list[Any]:
    also: Any = run.parts.also
    tensors = [*also["ema"].state_dict().values(), *also["critic"].state_dict().values(), *also["counter"].seen]
    tensors += [v for state in also["critic_optimizer"].state.values() for v in state.values()]
    return [*run.bits(), also["counter"].count, *(tensor.tolist() for tensor in tensors)]


@pytest.mark.parametrize("settings", [{}, {"format": "dcp"}])
@pytest.mark.parametrize("is_new_process", [False, True])
def test_an_average_and_whatever_else_is_given_comes_back(
    tmp_path: Path, settings: dict[str, Any], is_new_process: bool
) -> None:
    run = PlainRun(tmp_path, **settings)
    give(run)
    for _ in range(3):
        step(run)
    name, before = run.save(), bits(run)
    step(run, bad=True)
    step(run)
    assert not torch.isfinite(run.parts.also["ema"].module.first.weight).all()
    if is_new_process:
        run = PlainRun(tmp_path, **settings)
        give(run)
    report = run.manager.restore(name)
    assert bits(run) == before
    assert {"ema", "critic", "critic_optimizer", "counter"} <= set(report.restored)
    step(run)  # and the file keeps what it held
    run.manager.restore(name)
    assert bits(run) == before


def test_a_part_of_the_model_comes_back_with_it(tmp_path: Path) -> None:
    run = PlainRun(tmp_path)
    average = AveragedModel(run.model).requires_grad_(False)
    run.model.average = average
    run.step()
    name, before = run.save(), [p.tolist() for p in average.parameters()]
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.fill_(float("nan"))
    run.manager.restore(name)
    assert [p.tolist() for p in average.parameters()] == before


def test_what_does_not_fit_is_refused_with_nothing_changed(tmp_path: Path) -> None:
    run = PlainRun(tmp_path)
    run.step()
    without = run.save()
    also = give(run)
    step(run)
    other = torch.nn.Linear(4, 5)
    name, before = run.save(), bits(run)
    with pytest.raises(Unfit, match=r"saved without ema \(also=\)"):
        run.manager.restore(without)
    run.parts.also = {**also, "critic": other}
    with pytest.raises(Unfit, match=r"critic \(also=\) is another one, it differs in"):
        run.manager.restore(name)
    run.parts.also = {**also, "critic_optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)}
    with pytest.raises(Unfit, match="groups"):
        run.manager.restore(name)
    run.parts.also = also
    assert bits(run) == before
    run.parts.also = {}  # no longer wanted
    assert run.manager.restore(name).step == 2


def test_what_is_not_restored_is_noticed_and_what_cannot_be_stored_is_named(tmp_path: Path) -> None:
    run = PlainRun(tmp_path)
    also = give(run)
    step(run)
    name = run.save()
    step(run)
    also["critic"].load_state_dict = lambda state: None
    with pytest.raises(PartlyRestored, match=r"critic \(also=\) does not hold what was saved"):
        run.manager.restore(name)
    also["counter"].count = object()
    with pytest.raises(CheckpointError, match=r"also\.counter\.count: object cannot be stored"):
        run.manager.save(7)


def test_damage_to_its_file_is_refused(tmp_path: Path) -> None:
    run = PlainRun(tmp_path)
    give(run)
    step(run)
    older = run.save()
    step(run)
    name = run.save()
    file = tmp_path / name / "also.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert run.manager.restore(name).checkpoint == older


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("is_equal", [True, False])
def test_copies_save_it_once_where_it_is_equal(tmp_path: Path, is_equal: bool) -> None:
    ranks = Ranks(tmp_path)
    for rank, run in enumerate(ranks):
        torch.manual_seed(5)
        give(run)
        torch.manual_seed(6)
        step(run)
        run.parts.also["counter"].count += 0 if is_equal else rank
    before = [bits(run) for run in ranks]
    ranks.save(1)
    files = {name for name in manifest.read(tmp_path / name_of(1)).files if name.startswith("also")}
    assert len(files) == (1 if is_equal else 2)
    for run in ranks:
        step(run)
        run.manager.put_back(run.manager.load(name_of(1), allow_without_data=False), skip_batches=0, refused={})
    assert [bits(run) for run in ranks] == before
    others = Ranks(tmp_path, 3)
    for run in others:
        give(run)
    if is_equal:
        assert others.runs[2].manager.load(name_of(1), allow_without_data=True).also["counter"]["count"] == 1
    else:
        with pytest.raises(Unfit, match="state given as also= of its own, which cannot be assigned to 3 ranks"):
            others.runs[2].manager.load(name_of(1), allow_without_data=True)


def test_ranks_that_hold_shards_save_their_own(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    for run in ranks:
        give(run)
        step(run)
    before = [bits(run) for run in ranks]
    ranks.save(1)
    assert {"also-00000.pt", "also-00001.pt"} < set(manifest.read(tmp_path / name_of(1)).files)
    for run in ranks:
        step(run)
        run.manager.put_back(run.manager.load(name_of(1), allow_without_data=False), skip_batches=0, refused={})
    assert [bits(run) for run in ranks] == before
