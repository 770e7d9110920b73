"""What a rollback may leave out is bounded, costs no reading where a sampler hands out indices, and its parameters are
named when they are wrong."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import TinyRun
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fp8watch.actions.rollback import CHANGES
from fp8watch.errors import ActionError, BadInput
from fp8watch.policy.load import parse
from fp8watch.training.data import Batches
from fp8watch.vocabulary import MAX_SKIP_BATCHES


class Counting(Dataset[torch.Tensor]):
    """Rows that are counted when they are read."""

    def __init__(self, size: int) -> None:
        self.size, self.read = size, list[int]()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return torch.tensor([index])


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return (torch.tensor([number]) for number in range(40))


def trained(root: Path) -> TinyRun:
    run = TinyRun(root, every=10)
    run.run(20)
    return run


# The bound


def test_a_command_that_would_leave_out_too_much_is_refused_with_nothing_changed(tmp_path: Path) -> None:
    run = trained(tmp_path)
    for skip in (MAX_SKIP_BATCHES + 1, 10**9):
        with pytest.raises(ActionError, match=f"skip_batches is {skip}, it must be at most {MAX_SKIP_BATCHES}"):
            run.apply("rollback", onset_step=12, skip_batches=skip)
    assert (run.global_step, run.attempt) == (20, 0)
    assert run.apply("rollback", onset_step=12, skip_batches=MAX_SKIP_BATCHES).steps_replayed == 10


def test_a_policy_that_would_is_named_when_it_is_read() -> None:
    text = (
        "version: 1\nrules:\n  - name: a\n    when: {detector: stuck}\n"
        "    ladder:\n      - {action: rollback, skip_batches: SKIP}\n"
    )
    with pytest.raises(BadInput, match=f":6: .*skip_batches: at most {MAX_SKIP_BATCHES} is wanted"):
        parse(text.replace("SKIP", str(MAX_SKIP_BATCHES + 1)))
    parse(text.replace("SKIP", str(MAX_SKIP_BATCHES)))


def test_the_longest_skip_does_not_stall_the_loop() -> None:
    data = Counting(64)
    batches = Batches(DataLoader(data, batch_size=2, shuffle=True))
    running = iter(batches)
    next(running)
    state = batches.state_dict()
    data.read.clear()
    batches.load_state_dict(state, skip_batches=MAX_SKIP_BATCHES)
    started = time.thread_time()
    next(running)
    assert time.thread_time() - started < 1.0
    assert len(data.read) == 2, "nothing that is left out is read, over the end of epochs neither"
    assert batches.skipped_samples == 2 * MAX_SKIP_BATCHES
    assert batches.samples == 2 * (MAX_SKIP_BATCHES + 2)


# Left out without being read is left out as if it had been


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("seen", "skip"), [(0, 1), (1, 3), (2, 4), (4, 7), (5, 11)])
def test_the_batch_after_a_skip_is_that_of_a_run_that_read_them_all(workers: int, seen: int, skip: int) -> None:
    def loader() -> DataLoader[torch.Tensor]:
        return DataLoader(Counting(10), batch_size=2, shuffle=True, num_workers=workers)

    def rows(batches: Any, count: int) -> list[list[int]]:
        found: list[list[int]] = []
        while len(found) < count:
            for batch in batches:
                found.append(batch.flatten().tolist())
                if len(found) == count:
                    break
        return found

    torch.manual_seed(3)
    expected = rows(loader(), 5)  # one epoch: the skip may end in a later one, whose order is its own
    torch.manual_seed(3)
    batches = Batches(loader())
    running = iter(batches)
    state = batches.state_dict()
    for index in range(min(seen, 5)):
        assert next(running).flatten().tolist() == expected[index]
        state = batches.state_dict()
    if seen == 0:
        next(running)
        state = batches.state_dict() | {"index": 0, "samples": 0}
    batches.load_state_dict(state, skip_batches=skip)
    after = next(running).flatten().tolist()
    assert (batches.samples, batches.skipped_samples) == (2 * (seen + skip + 1), 2 * skip)
    assert batches.state_dict()["index"] == (seen + skip) % 5 + 1
    if seen + skip < 5:
        assert after == expected[seen + skip]


def test_a_stream_is_read_through() -> None:
    batches = Batches(DataLoader(Stream(), batch_size=4))
    running = iter(batches)
    next(running)
    batches.load_state_dict(batches.state_dict(), skip_batches=3)
    assert next(running).flatten().tolist() == [16, 17, 18, 19]
    assert (batches.samples, batches.skipped_samples) == (20, 12)


def test_a_skip_from_before_the_first_batch() -> None:
    batches = Batches(DataLoader(Counting(10), batch_size=2))
    batches.load_state_dict(batches.state_dict(), skip_batches=6)
    assert next(iter(batches)).flatten().tolist() == [2, 3]
    assert (batches.samples, batches.skipped_samples) == (14, 12)


def test_an_empty_loader_ends() -> None:
    batches = Batches(DataLoader(Counting(0), batch_size=2))
    batches.load_state_dict(batches.state_dict(), skip_batches=6)
    assert list(batches) == []


# `changes`


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["x"], "[0] is 'x'"),
        ("x", "changes is 'x'"),
        (3, "changes is 3"),
        ({"action": "hold_lr"}, "changes is {'action': 'hold_lr'}"),
        ([{"action": "halt"}], "[0] has the action 'halt'"),
        ([{"params": {}}], "[0] has the action None"),
        ([{"action": ["hold_lr"]}], "[0] has the action ['hold_lr']"),
        ([{"action": "hold_lr", "factor": 0.5}], "[0] has factor"),
        ([{"action": "hold_lr", "params": 3}], "[0] has the params 3"),
        ([{"action": "hold_lr", "params": {1: 2}}], "[0] has the params {1: 2}"),
        ([3, {"action": "hold_lr", "params": {"factor": 0.5}}, {"action": "y"}], "[0] is 3; [2] has the action 'y'"),
    ],
)
def test_changes_that_are_none_are_named_with_those_that_may_be_made(tmp_path: Path, changes: Any, said: str) -> None:
    run = trained(tmp_path)
    with pytest.raises(ActionError, match=re.escape(said)) as caught:
        run.apply("rollback", onset_step=12, changes=changes)
    assert str(caught.value).endswith(f"the action one of {', '.join(CHANGES)}")
    assert run.global_step == 20
