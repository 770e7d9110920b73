"""What the stress of random sequences says of runs that are not alike, slow or different the next time."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_controller import Cut, Order
from real_ranks import command

from fp8watch.records import Command, StepFrame

BENCH = Path(__file__).parents[2] / "bench"
HELD, ANSWERED = [5, "hold_lr-1", "apply", 0, 1], [6, "hold_lr-1", "apply", 0, 1, 6, "applied", "ok", ""]


@pytest.fixture(autouse=True)
def _bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def judged(folder: Path, *changes: dict[str, Any], last_step: int = 1000) -> dict[str, Any]:
    """A sequence of two ranks and one order; `changes`: of the last line of each rank."""
    from stress_judge import judge
    from stress_sequences import Sequence

    sequence = Sequence(
        name="s", orders=[Order(command=command("s", 1, "hold_lr", last_step=last_step), after=4)], faults={}
    )
    for rank in range(2):
        last = {
            "ended": "end", "log": [["hold_lr-1", "apply", 6]], "asked": [[4, "hold_lr-1", "apply", 0, 1]],
            "held": [HELD], "answers": [ANSWERED], "problem": "",
        } | (changes[rank] if rank < len(changes) else {})  # fmt: skip
        lines = [{"step": step, "attempt": 0, "checksum": "c"} for step in range(1, 25)]
        (folder / f"s-{rank}.jsonl").write_text("\n".join(map(json.dumps, [*lines, last])))
    return judge(sequence, folder, 2)


def test_a_sequence_in_which_all_is_well_passes(tmp_path):
    row = judged(tmp_path)
    assert (row["pass"], row["why"], row["decided_steps"], row["known_steps"]) == (True, "", [2], [1])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"answers": [[11, *ANSWERED[1:]]]}, "took more than 5 steps"),
        ({"answers": []}, "not ruled on"),
        ({"log": []}, "carried out different things"),
        ({"ended": "RanksApart 85"}, "ended differently"),
        ({"problem": "a command did not come"}, "did not come"),
    ],
)
def test_a_rank_that_is_slow_forgets_or_differs_is_found(tmp_path, change, why):
    row = judged(tmp_path, {}, change)
    assert not row["pass"]
    assert why in row["why"]


def test_what_came_late_to_one_rank_is_counted_from_there(tmp_path):
    later = {"held": [[12, *HELD[1:]]], "answers": [[13, *ANSWERED[1:]]]}
    row = judged(tmp_path, {"answers": [[13, *ANSWERED[1:]]]}, later)
    assert (row["decided_steps"], row["known_steps"], row["held_up"]) == ([], [1], 1)


def test_a_command_that_one_rank_never_held_is_no_delay(tmp_path):
    row = judged(tmp_path, {}, {"held": [], "answers": []})
    assert (row["known_steps"], row["never_known"]) == ([], 1)


@pytest.mark.parametrize(("last_step", "is_over"), [(24, True), (25, False)])
def test_what_came_to_one_rank_only_is_answered_by_it_when_it_expires(tmp_path, last_step, is_over):
    row = judged(tmp_path, {"answers": [], "log": []}, {"held": [], "answers": [], "log": []}, last_step=last_step)
    assert row["pass"] == (not is_over)
    assert ("never answered" in row["why"]) == is_over


def test_an_answer_that_is_repeated_is_one_to_what_was_sent_again(tmp_path):
    again = {"held": [HELD, [9, "hold_lr-1", "apply", 1, 1]]}
    repeated = {"answers": [ANSWERED, [9, "hold_lr-1", "apply", 0, 0, 6, "applied", "ok", ""]]}
    assert judged(tmp_path, again)["why"] == "hold_lr-1 was never answered by a rank that held it"
    assert judged(tmp_path, again | repeated)["pass"]


def test_other_decisions_the_next_time_are_a_failure(tmp_path):
    from agreement_stress import report

    chosen = argparse.Namespace(sequences=1, by_clock=0, repeat=2, launches=1, ranks=2, seed=0)
    found = report([judged(tmp_path)], [[judged(tmp_path)]], chosen)
    assert (found["passed"], found["played_again"], found["differing_decisions"]) == (1, 1, 0)
    other = judged(tmp_path, {"answers": [[*ANSWERED[:-1], "for another reason"]]})
    found = report([judged(tmp_path)], [[other]], chosen)
    assert (found["passed"], found["differing_decisions"], found["differing_parameters"]) == (0, 1, 0)


class Link:
    is_connected, num_connections = True, 1


class Uplink:
    """Gives what is put into `inbox`, a while after it was asked for."""

    def __init__(self) -> None:
        self._channel = argparse.Namespace(_link=Link())
        self.inbox: Iterator[list[Command]] = iter(())

    def send(self, message: Any) -> None:
        pass

    def take(self) -> list[Command]:
        return next(self.inbox, [])


def frame(step: int) -> StepFrame:
    return StepFrame(run="s", attempt=0, rank=0, step=step, time_unix=0.0, layout_id=1, scalars={}, columns={})


def test_a_command_is_taken_in_at_its_boundary_whether_it_is_early_or_slow():
    from stress_arrivals import Arrivals
    from stress_sequences import Sequence

    early, slow = (Order(command=command("s", number, "hold_lr"), after=1) for number in (1, 2))
    sequence = Sequence(name="s", orders=[early, slow], faults={}, delays={(0, 0): 2, (1, 0): 2})
    uplink = Uplink()
    arrivals = Arrivals(uplink, sequence, 0)
    uplink.inbox = iter([[early.command], [], [], [], [slow.command]])
    taken = []
    for step in (1, 2, 3):
        arrivals.boundary = step
        arrivals.send(frame(step))
        taken.append(arrivals.take())
    assert taken == [[], [], [early.command, slow.command]]
    arrivals.finish()
    assert arrivals.problem == ""
    assert arrivals.held == [[3, "hold_lr-1", "apply", 0, 1], [3, "hold_lr-2", "apply", 0, 2]]


def test_after_a_cut_nothing_comes_until_the_outage_is_over():
    from stress_arrivals import Arrivals
    from stress_sequences import Sequence

    order = Order(command=command("s", 1, "hold_lr"), after=2)
    sequence = Sequence(
        name="s", orders=[order], faults={}, cuts=[Cut(rank=0, at=1)], delays={(0, 0): 0}, outages={0: 3}
    )  # fmt: skip
    uplink = Uplink()
    arrivals = Arrivals(uplink, sequence, 0)
    held = []
    for step in range(1, 7):
        arrivals.boundary = step
        arrivals.send(frame(step))
        uplink._channel._link.num_connections = 2  # the link has noticed the cut, and made a new connection
        uplink.inbox = iter([[order.command]] if step == 2 else [])
        held.append(len(arrivals.take()))
    assert held == [0, 0, 0, 0, 1, 0]


def test_what_was_not_foreseen_is_told():
    from stress_arrivals import Arrivals
    from stress_sequences import Sequence

    uplink = Uplink()
    arrivals = Arrivals(uplink, Sequence(name="s", orders=[], faults={}), 0)
    uplink.inbox = iter([[command("s", 1, "hold_lr")]])
    arrivals.finish()
    assert "hold_lr-1 came" in arrivals.problem
