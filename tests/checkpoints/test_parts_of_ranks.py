"""Checkpoints of several ranks: each rank is a run of its own here, in one process and one directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranked_runs import Ranks, name_of

from fp8watch.checkpoints import elastic, ledger, manifest, owner, underway
from fp8watch.checkpoints.quick_sum import PIECE_BYTES, quick_sums
from fp8watch.checkpoints.restore import Unfit
from fp8watch.errors import CheckpointError


# case: CKP-03
def test_pending_until_the_last_rank_has_written_its_part(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 3)
    ranks.step()
    first, second, third = (run.manager for run in ranks)
    told: list[str] = []
    first.on_change = lambda record: told.append(record.label)
    assert first.save(1).label == second.save(1).label == "pending"
    first.poll()
    assert [record.label for record in first.records()] == ["pending"]
    assert first.newest_usable() is None
    assert not (tmp_path / name_of(1)).exists()
    third.save(1)
    first.poll()
    assert told == ["pending", "candidate"]
    assert [record.label for record in second.records()] == ["candidate"]  # read from the first rank's ledger
    assert len(manifest.read(tmp_path / name_of(1)).ranks) == 3


def test_a_step_is_saved_once_by_every_rank(tmp_path: Path) -> None:
    """By an action and by the cadence at the same step; a rank that only reads the ledger knows, too."""
    ranks = Ranks(tmp_path)
    ranks.step()
    for run in ranks:
        first = run.manager.save(1, reason="asked for")
        assert run.manager.save(1).checkpoint == first.checkpoint == name_of(1)
    ranks.runs[0].manager.poll()
    assert ranks.runs[1].manager.save(1).checkpoint == name_of(1)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        owner.NAME, ledger.COPY, "ledger.json", name_of(1),
    ]  # fmt: skip


def test_only_the_first_rank_writes_the_ledger(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.step()
    ranks.save(1)
    before = (tmp_path / "ledger.json").read_bytes()
    second = ranks.runs[1].manager
    second.records()
    second.label(name_of(1), "tainted", "no")
    assert (tmp_path / "ledger.json").read_bytes() == before
    assert second.records()[0].label == "candidate"


@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_that_cannot_save_costs_one_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    ranks = Ranks(tmp_path)
    ranks.step()

    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    managers_ = [run.manager for run in ranks]
    for number in (0, 1) if bad == 0 else (1, 0):
        if number == bad:
            with monkeypatch.context() as patch:
                patch.setattr(underway, "write_files", full)
                with pytest.raises(CheckpointError, match="No space left"):
                    managers_[number].save(1)
        elif bad == 0:
            managers_[number].save(1)
        else:  # it sees at once that the other has given up
            with pytest.raises(CheckpointError, match="rank 1 could not save"):
                managers_[number].save(1)
    managers_[0].poll()
    assert managers_[0].records() == []
    assert not list(tmp_path.glob(".unfinished*"))
    ranks.step()
    ranks.save(2)
    assert [record.checkpoint for record in managers_[0].records()] == [name_of(2)]


def test_a_part_that_never_comes_is_given_up_and_said(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.step()
    first = ranks.runs[0].manager
    first.save(1)
    ranks.clock.now += underway.GIVE_UP_SECONDS - 1
    first.poll()
    ranks.clock.now += 2
    with pytest.raises(CheckpointError, match=r"nothing was seen of rank 1 .* the same for all ranks\?"):
        first.poll()
    assert first.records() == []
    assert first.pending == []


def test_every_rank_comes_back_to_its_own_state(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.runs[1].run(1)  # what ranks hold differs, as with shards
    ranks.step(2)
    bits = []
    for run in ranks:
        bits.append(run.bits())
        run.manager.save(2)
    for run in ranks:
        run.manager.poll()
    ranks.step(2)
    for run, before in zip(ranks, bits, strict=True):
        loaded = run.manager.load(name_of(2), allow_without_data=False)
        run.manager.put_back(loaded, skip_batches=0, refused={})
        assert run.bits() == before


@pytest.mark.usefixtures("copies")
def test_copies_are_saved_once_and_restored_everywhere(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.step(2)
    ranks.runs[1].model.norm.running_mean.fill_(7.0)  # type: ignore[union-attr, operator]  # each rank has its own
    ranks.save(2)
    files = set(manifest.read(tmp_path / name_of(2)).files)
    (optimizer,) = (name for name in files if name.startswith("optimizer-"))
    assert files == {"model.pt", optimizer, "state-00000.pt", "state-00001.pt"}
    bits = [run.bits() for run in ranks]
    random = torch.get_rng_state()
    ranks.step(2)
    for run, before in zip(ranks, bits, strict=True):
        loaded = run.manager.load(name_of(2), allow_without_data=False)
        run.manager.put_back(loaded, skip_batches=0, refused={})
        assert torch.equal(torch.get_rng_state(), random)
        assert run.bits() == before


# case: DST-08
@pytest.mark.usefixtures("copies")
def test_copies_that_differ_make_a_checkpoint_that_nobody_goes_back_to(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 3)
    ranks.step()
    with torch.no_grad():
        ranks.runs[2].model.first.weight[0, 0] += 1e-6
    ranks.save(1)
    (record,) = ranks.runs[0].manager.records()
    assert (record.label, record.reason) == ("tainted", "parameters of rank 2 are not those of rank 0")


def test_a_missing_file_of_another_rank_is_seen_by_every_rank(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.step()
    ranks.save(1)
    (tmp_path / name_of(1) / "model-00001.pt").unlink()
    for run in ranks:
        with pytest.raises(CheckpointError, match=r"model-00001\.pt"):
            run.manager.load(name_of(1), allow_without_data=True)


@pytest.mark.parametrize("is_quick", [False, True])
@pytest.mark.parametrize("damage", ["flipped", "truncated"])
def test_damage_is_seen_by_the_rank_whose_file_it_is(tmp_path: Path, damage: str, is_quick: bool) -> None:
    ranks = Ranks(tmp_path)
    ranks.step()
    ranks.save(1)
    file = tmp_path / name_of(1) / "optimizer-00001.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 64
    file.write_bytes(data if damage == "flipped" else data[:-1])
    first, second = (run.manager for run in ranks)
    if damage == "flipped":
        first.load(name_of(1), allow_without_data=True, is_quick=is_quick)
    with pytest.raises(CheckpointError, match=r"optimizer-00001\.pt"):
        second.load(name_of(1), allow_without_data=True, is_quick=is_quick)


# case: CKP-16
def test_shards_do_not_fit_another_number_of_ranks(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.step()
    ranks.save(1)
    for run in Ranks(tmp_path, 3):
        with pytest.raises(Unfit, match="sharded over 2 ranks, here are 3"):
            run.manager.load(name_of(1), allow_without_data=True)


# case: CKP-11
@pytest.mark.usefixtures("copies")
def test_a_rank_that_was_not_there_draws_numbers_of_its_own(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.step()
    ranks.save(1)
    drawn = []
    for run in Ranks(tmp_path, 4):
        loaded = run.manager.load(name_of(1), allow_without_data=True)
        report = run.manager.put_back(loaded, skip_batches=0, refused={})
        drawn.append(torch.rand(()).item())
        assert "was saved by 2 ranks, here are 4" in report.notes[0]
        assert any("did not exist when this was saved" in note for note in report.notes) == (run.manager.rank >= 2)
    assert len({*drawn[1:]}) == 3  # ranks 0 and 1 have been saved with the same state by this process
    again = [run.manager.load(name_of(1), allow_without_data=True) for run in Ranks(tmp_path, 4)]
    assert torch.equal(again[3].state["rng"]["host"]["torch"], again[3].state["rng"]["host"]["torch"])


@given(st.integers(1, 16), st.integers(1, 16), st.integers(0, 1000))
def test_samples_are_dealt_out_anew_and_none_is_left_out(saved: int, here: int, index: int) -> None:
    state = {"data": {"index": index, "samples": 4 * index, "epoch_state": {"sampler_epoch": 3}}, "rng": {}}
    described = manifest.Manifest(
        format_version=3, checkpoint="c", run="r", attempt=0, step=1, samples=0, data_position_included=True,
        time_unix=0.0, world_size=saved, parts=[], absent={}, learning_rate=[], parameter_checksum="", rng_sha256="",
        files={}, versions={}, layout="replicas",
    )  # fmt: skip
    elastic.adapt(state, described, 0, here)
    consumed, now = index * saved, state["data"]["index"] * here
    assert now <= consumed < now + here


@given(st.binary(min_size=1, max_size=300), st.data())
def test_the_quick_sum_sees_any_change_of_one_byte(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("q") / "x"
    path.write_bytes(content)
    before = quick_sums([(path, len(content))])
    changed = bytearray(content)
    changed[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(changed)
    assert quick_sums([(path, len(content))]) != before
    path.write_bytes(content)
    assert quick_sums([(path, len(content))]) == before


def test_the_quick_sum_of_pieces_in_threads_and_of_a_file_that_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "x"
    size = 2 * PIECE_BYTES + 12345
    generator = torch.Generator().manual_seed(0)
    path.write_bytes(torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).numpy().tobytes())
    first = quick_sums([(path, size)])
    with open(path, "r+b") as file:
        file.seek(PIECE_BYTES)
        byte = file.read(1)
        file.seek(PIECE_BYTES)
        file.write(bytes([byte[0] ^ 128]))
    assert quick_sums([(path, size)]) != first
    assert quick_sums([(path, size)], is_mapped=True) == quick_sums([(path, size)])
    for is_mapped in (False, True):
        with pytest.raises(OSError, match="ended early"):
            quick_sums([(path, size + 8)], is_mapped=is_mapped)
