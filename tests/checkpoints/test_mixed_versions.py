"""Ranks of different versions of fp8watch, whose checksums are by different algorithms, spoil no checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from ranked_runs import Ranks, name_of

from fp8watch.checkpoints import manifest
from fp8watch.checkpoints.bit_sums import LATEST, WEIGHTED
from fp8watch.checkpoints.checksum import parameter_checksum
from fp8watch.checkpoints.restore import PartlyRestored
from fp8watch.errors import CheckpointError


class OlderTogether:
    """The ranks have found that one of them knows the earlier algorithm only."""

    algorithm = WEIGHTED

    def all_begin(self, about: str, cannot: str) -> str:
        return cannot

    def declined(self) -> str:
        return ""


def save_with_an_older_rank(ranks: Ranks, change: Callable[[str], str] = str) -> None:
    """Rank 1 writes its part as format 3 does: with the earlier checksum, and without a name of its algorithm."""
    first, older = ranks.runs
    first.manager.save(1)
    older.manager.save(1)
    (file,) = first.manager.root.glob(".*/part-00001.json")
    part = msgspec.json.decode(file.read_bytes())
    del part["checksum_algorithm"]
    part["parameter_checksum"] = change(parameter_checksum(older.model, WEIGHTED))
    file.write_bytes(msgspec.json.encode(part))
    first.manager.poll()


@pytest.mark.usefixtures("copies")
def test_copies_that_cannot_be_compared_are_not_taken_for_different(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Ranks(tmp_path)
    ranks.step()
    save_with_an_older_rank(ranks)
    (record,) = ranks.runs[0].manager.records()
    assert record.label == "candidate"
    assert "rank 1 runs another version of fp8watch: whether its copy is the same is not known" in caplog.text
    bits = [run.bits() for run in ranks]
    ranks.step()
    for run, before in zip(ranks, bits, strict=True):
        run.manager.put_back(run.manager.load(name_of(1), allow_without_data=False), skip_batches=0, refused={})
        assert run.bits() == before


def test_shards_of_each_rank_are_verified_by_its_own_algorithm(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.runs[1].run(1)
    ranks.step()
    save_with_an_older_rank(ranks)
    found = manifest.read(tmp_path / name_of(1))
    assert [part.checksum_algorithm for part in found.ranks] == [LATEST, WEIGHTED]
    bits = ranks.runs[1].bits()
    ranks.step()
    older = ranks.runs[1].manager
    older.put_back(older.load(name_of(1), allow_without_data=False), skip_batches=0, refused={})
    assert ranks.runs[1].bits() == bits


def test_a_wrong_checksum_of_an_older_rank_is_noticed(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.runs[1].run(1)
    ranks.step()
    save_with_an_older_rank(ranks, lambda checksum: "0123456789abcdef")
    older = ranks.runs[1].manager
    with pytest.raises(PartlyRestored, match="parameters have checksum"):
        older.put_back(older.load(name_of(1), allow_without_data=False), skip_batches=0, refused={})


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("differ", [False, True])
def test_ranks_that_know_of_an_older_one_use_its_algorithm_and_compare(tmp_path: Path, differ: bool) -> None:
    ranks = Ranks(tmp_path, together=lambda rank: OlderTogether())
    ranks.step()
    if differ:
        with torch.no_grad():
            ranks.runs[1].model.first.weight[0, 0] += 1e-6
    ranks.save(1)
    found = manifest.read(tmp_path / name_of(1))
    assert found.checksum_algorithm == WEIGHTED
    assert found.parameter_checksum == parameter_checksum(ranks.runs[0].model, WEIGHTED)
    (record,) = ranks.runs[0].manager.records()
    assert record.label == ("tainted" if differ else "candidate")


def test_a_part_by_an_algorithm_that_is_not_known_here_is_refused(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.runs[1].run(1)
    ranks.step()
    ranks.save(1)
    found = manifest.read(tmp_path / name_of(1))
    parts = [msgspec.structs.replace(part, checksum_algorithm="of-tomorrow") for part in found.ranks]
    newer = msgspec.structs.replace(found, ranks=parts)
    (tmp_path / name_of(1) / manifest.NAME).write_bytes(manifest.write(newer))
    with pytest.raises(CheckpointError, match="of-tomorrow"):
        ranks.runs[1].manager.load(name_of(1), allow_without_data=False)
