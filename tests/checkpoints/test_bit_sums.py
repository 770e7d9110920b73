"""What the sums over parameters detect, and that checkpoints of the version before are verified by their own sum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_run import PlainRun

from fp8watch.checkpoints import manifest
from fp8watch.checkpoints.bit_sums import ALGORITHMS, LATEST, WEIGHTED, row_column_sums
from fp8watch.checkpoints.checksum import parameter_checksum, sum_bits, sum_each
from fp8watch.checkpoints.restore import PartlyRestored
from fp8watch.errors import CheckpointError

ROW = 1021
WORDS = 5 * ROW + 17
PLACES = st.integers(0, WORDS - 1)


def some_words() -> torch.Tensor:
    return torch.arange(WORDS) * 7_919_777_777 + 1


def exchanged(words: torch.Tensor, first: int, second: int) -> torch.Tensor:
    found = words.clone()
    found[first], found[second] = words[second], words[first]
    return found


@given(PLACES, PLACES)
def test_an_exchange_of_two_words_is_detected(first: int, second: int) -> None:
    words = some_words()
    assert (row_column_sums([words]) == row_column_sums([exchanged(words, first, second)])) == (first == second)


# The weighted sum misses these: the weights of the two places are equal.
@pytest.mark.parametrize(("first", "second"), [(ROW, 2), (3 * ROW + 10, 2 * ROW + 12), (4 * ROW, 2 * ROW + 4)])
def test_an_exchange_of_words_of_equal_weight_is_detected(first: int, second: int) -> None:
    words, other = some_words(), exchanged(some_words(), first, second)
    assert ALGORITHMS[WEIGHTED]([words]) == ALGORITHMS[WEIGHTED]([other])
    assert sum_bits([words]) != sum_bits([other])


@given(st.sets(PLACES, min_size=1, max_size=3), st.integers(0, 63))
def test_a_flip_of_the_same_bit_in_up_to_three_words_is_detected(places: set[int], bit: int) -> None:
    words = some_words()
    flipped = words.clone()
    for place in places:
        flipped[place] ^= -(1 << 63) if bit == 63 else 1 << bit
    assert row_column_sums([words]) != row_column_sums([flipped])


@pytest.mark.parametrize("shift", [1, 2, ROW - 2, ROW, ROW + 2, 2 * ROW])
def test_a_shift_of_all_words_is_detected(shift: int) -> None:
    words = some_words()
    assert row_column_sums([words]) != row_column_sums([words.roll(shift)])


def test_the_sum_of_a_tensor_does_not_depend_on_the_others() -> None:
    tensors = [torch.randn(shape) for shape in (3, 2 * ROW, 4 * ROW + 5, 9 * ROW)]
    before = [tensor.clone() for tensor in tensors]
    assert sum_each(tensors) == [sum_each([tensor])[0] for tensor in tensors]
    assert all(torch.equal(tensor, kept) for tensor, kept in zip(tensors, before, strict=True))


def test_the_sums_stay_what_manifests_hold() -> None:
    """Another value here needs another name, or saved checkpoints are refused."""
    tensors = [(torch.arange(5000) * 7919 % 251).float(), torch.arange(7).bfloat16(), torch.zeros(0)]
    assert {name: sum_bits(tensors, name) for name in ALGORITHMS} == {
        WEIGHTED: "df60573988aa1634", LATEST: "89677dc3f9763eda",
    }  # fmt: skip


def rewrite(run: PlainRun, name: str, **changes: Any) -> None:
    folder = run.manager.root / name
    changed = msgspec.structs.replace(manifest.read(folder), **changes)
    (folder / manifest.NAME).write_bytes(manifest.write(changed))


def of_version_3(run: PlainRun, name: str, checksum: str) -> None:
    """Turn a checkpoint into one of the format before, which has no name of an algorithm."""
    file = run.manager.root / name / manifest.NAME
    rewrite(run, name, format_version=3, checksum_algorithm=WEIGHTED, parameter_checksum=checksum)
    fields = msgspec.json.decode(file.read_bytes())
    del fields["checksum_algorithm"]
    file.write_bytes(msgspec.json.encode({**fields, "manifest_sha256": manifest._sum(fields)}))


def test_a_checkpoint_of_the_version_before_is_restored_and_verified(tmp_path: Path) -> None:
    run = PlainRun(tmp_path)
    run.run(2)
    name, bits, latest = run.save(), run.bits(), parameter_checksum(run.model)
    of_version_3(run, name, parameter_checksum(run.model, WEIGHTED))
    run.run(2)
    report = run.manager.restore(name)
    assert run.bits() == bits
    assert report.parameter_checksum == latest  # what the first update after the restore is compared with


def test_a_wrong_checksum_of_the_version_before_is_noticed(tmp_path: Path) -> None:
    run = PlainRun(tmp_path)
    name = run.save()
    of_version_3(run, name, "0123456789abcdef")
    with pytest.raises(PartlyRestored, match="parameters have checksum"):
        run.manager.restore(name)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"checksum_algorithm": "of-tomorrow"}, "of-tomorrow"), ({"format_version": 5}, "version 5")],
)
def test_what_a_later_version_has_written_is_refused_with_nothing_changed(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    run = PlainRun(tmp_path)
    name = run.save()
    rewrite(run, name, **changes)
    run.run(1)
    before = run.bits()
    with pytest.raises(CheckpointError, match=reason):
        run.manager.restore(name)
    assert run.bits() == before
