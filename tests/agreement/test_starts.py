"""A run that torchrun starts again is another start: what was ordered for the one before is carried out by no rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fake_controller import Order
from real_ranks import command, launch

from fp8watch.identity import Identity
from fp8watch.settings import Settings
from fp8watch.training.agreement.join import join

HOLD = Order(
    command=command("again", 1, "hold_lr", params={"factor": 0.01}, last_step=50), after=2, is_for_first_start=True
)
LATER = Order(command=command("again", 2, "hold_lr", params={"factor": 0.1}, last_step=50), after=10)
"""For whichever start has come so far."""


def steps(folder: Path, start: int, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"again-{start}-{rank}.jsonl").read_text().splitlines()]


def test_a_restarted_run_does_nothing_that_was_ordered_for_its_last_start(tmp_path: Path) -> None:
    job = launch("starts_program.py", 2, ["again"], tmp_path, {"again": [HOLD, LATER]}, with_torchrun=True, restarts=1)
    assert job.codes == [0], (tmp_path / "stderr-0").read_text()[-4000:]
    hellos = job.controller.hellos["again"]
    starts = list(dict.fromkeys(hello.start for hello in hellos))
    assert len(starts) == 2
    assert all(len(start) == 32 for start in starts)
    for start in starts:
        assert {hello.rank for hello in hellos if hello.start == start} == {0, 1}, "one name for all ranks"
    assert {hello.attempt for hello in hellos} == {0}, "the attempt does not tell the two apart"

    for rank in (0, 1):
        assert steps(tmp_path, 0, rank)[-1]["lr"] == [0.005], "the first start has obeyed"
        used = {line["step"]: line["lr"] for line in steps(tmp_path, 1, rank)}
        assert {tuple(used[step]) for step in range(1, 11)} == {(0.5,)}, "the second one has not"
        assert used[16] == [0.05], "and obeys what is for it"

    refused = [r for r in job.controller.results["again"] if r.status == "expired"]
    assert {(r.rank, r.id, r.start, r.detail) for r in refused} == {
        (rank, "hold_lr-1", starts[0], "decided for another start of this run") for rank in (0, 1)
    }
    applied = [r for r in job.controller.results["again"] if r.status == "applied" and r.id == "hold_lr-2"]
    assert {(r.rank, r.start) for r in applied} == {(0, starts[1]), (1, starts[1])}


def test_no_two_starts_of_a_process_have_one_name_and_what_only_observes_has_none() -> None:
    alone = [join(Identity(run="r"), Settings(), attempt=0, acts=True, policy="p").start for _ in range(2)]
    assert len(set(alone)) == 2
    assert all(alone)
    apart = join(Identity(run="r", world_size=2), Settings(), attempt=0, acts=False, policy="p")
    assert apart.start == "", "ranks that did not meet have no name in common"
