"""Real processes over gloo: what a command does on all of them, and what happens when one is missing.

Two launches, of two and of four ranks, play all scenarios one after the other; the tests look at what they wrote.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_controller import FakeController, Order

from fp8watch.controller.store_sqlite import SqliteStore
from fp8watch.records import ActionRecord, Command, CommandResult

PROGRAM = Path(__file__).with_name("rank_program.py")
ROOT = Path(__file__).parents[2]


def command(run: str, number: int, action: str, **fields: Any) -> Command:
    values: dict[str, Any] = {
        "id": f"{action}-{number}", "run": run, "attempt": 0, "term": 1, "sequence": number, "verb": "apply",
        "action": action, "params": {}, "last_step": 1000,
    }  # fmt: skip
    return Command(**{**values, **fields})


def in_turn(run: str, *wanted: tuple[str, dict[str, Any]], every: int = 6) -> list[Order]:
    return [
        Order(command=command(run, number, action, **fields), after=3 + every * (number - 1))
        for number, (action, fields) in enumerate(wanted, 1)
    ]


ACTIONS = in_turn(
    "actions",
    ("hold_lr", {"params": {"factor": 0.5}}),
    ("tighten_clip", {"params": {"max_norm": 0.25}}),
    ("bf16_layers", {"params": {"layers": ["module.0"]}}),
    ("raise_margin", {"params": {"bits": 1}}),
    ("repair_scale", {}),
    ("bf16_all", {}),
    ("skip_update", {"params": {"max_consecutive": 2}}),
    ("bf16_layers", {"verb": "revert", "id": "bf16_layers-3"}),
    ("bf16_all", {"verb": "revert", "id": "bf16_all-6"}),
)
ORDERS = {
    "actions": ACTIONS,
    "late": [Order(command=command("late", 1, "hold_lr", params={"factor": 0.5}), late={1: 9})],
    "veto": in_turn("veto", ("lengthen_warmup", {"params": {"factor": 2.0}}), ("hold_lr", {"params": {"factor": 0.5}})),
    "disarmed": in_turn("disarmed", ("hold_lr", {"params": {"factor": 0.5}})),
    "failing": in_turn("failing", ("bf16_layers", {"params": {"layers": ["module.nowhere"]}})),
    "unequal": [Order(command=command("unequal", 1, "hold_lr", params={"factor": 0.5}), after=20)],
    "scaler": in_turn("scaler", ("adjust_loss_scale", {"params": {"factor": 0.5}})),
    "rollback": in_turn("rollback", ("rollback", {"params": {"onset_step": 3}})),
    "halt": in_turn("halt", ("halt", {"params": {"reason": "test"}})),
    "killed": in_turn("killed", ("hold_lr", {"params": {"factor": 0.5}})),
    "lost": [Order(command=command("lost", 1, "hold_lr", params={"factor": 0.5}), late={1: 12})],
}


@dataclass(frozen=True)
class Launch:
    ranks: int
    folder: Path
    codes: list[int]
    controller: FakeController

    def lines(self, scenario: str, rank: int) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / f"{scenario}-{rank}.jsonl").read_text().splitlines()]

    def steps(self, scenario: str, rank: int) -> list[dict[str, Any]]:
        return [line for line in self.lines(scenario, rank) if "ended" not in line]

    def ends(self, scenario: str) -> list[str]:
        return [self.lines(scenario, rank)[-1].get("ended", "killed") for rank in range(self.ranks)]

    def assert_one_state(self, scenario: str, *, ranks: list[int] | None = None) -> None:
        """No step was finished in different states; parameters included."""
        by_rank = [self.steps(scenario, rank) for rank in ranks or range(self.ranks)]
        for lines in zip(*by_rank, strict=False):
            assert all(line == lines[0] for line in lines), f"step {lines[0]['step']}"

    def statuses(self, scenario: str, order: Order) -> list[list[tuple[str, str]]]:
        answers = self.controller.answers(scenario, order.command)
        return [[(r.status, r.readback) for r in answers.get(rank, [])] for rank in range(self.ranks)]


def launch(ranks: int, scenarios: list[str], folder: Path) -> Launch:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sockets = Path(tempfile.mkdtemp(prefix="fp8w"))  # a socket's path is short
    controller = FakeController(sockets / "c.sock", ORDERS)
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "FP8WATCH_AGENT": controller.address, "FP8WATCH_DIR": str(folder / "fp8watch"), "FP8WATCH_REPORT": "0",
        "FP8WATCH_METRICS_PORT": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "agent")]),
    }  # fmt: skip
    processes = []
    for rank in range(ranks):
        with (folder / f"stderr-{rank}").open("w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(PROGRAM), str(folder), *scenarios],
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stderr=log,
                )
            )
    try:
        codes = [process.wait(150) for process in processes]
    except subprocess.TimeoutExpired:
        said = "\n".join((folder / f"stderr-{rank}").read_text()[-3000:] for rank in range(ranks))
        raise AssertionError(f"ranks hang\n{said}") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    controller.close()
    shutil.rmtree(sockets)
    return Launch(ranks, folder, codes, controller)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    names = ["actions", "late", "veto", "disarmed", "failing", "unequal", "scaler", "halt", "killed"]
    return launch(4, names, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return launch(2, ["embedded", "rollback", "bad-gradients", "unequal", "lost"], tmp_path_factory.mktemp("two"))


def test_every_action_is_in_force_on_all_ranks_from_one_step_on(four):
    """Rank 2 is slower than the others. bf16 layers leave and join the amax reduction on all ranks at once."""
    assert four.ends("actions") == ["end"] * 4
    four.assert_one_state("actions")
    for order in ACTIONS:
        answers = four.controller.answers("actions", order.command)
        assert sorted(answers) == [0, 1, 2, 3], order.command.action
        assert len({result.step for results in answers.values() for result in results}) == 1, order.command.action
        assert {(r[-1].status, r[-1].readback, r[-1].detail) for r in answers.values()} == {("applied", "ok", "")}
    applied = [four.controller.answers("actions", order.command)[0][0].step for order in ACTIONS]
    hold, clip, layer, margin, _, everything, _, _, back = applied
    steps = {line["step"]: line for line in four.steps("actions", 3)}
    assert (steps[hold]["lr"], steps[hold + 1]["lr"]) == ([0.01], [0.005])
    assert (steps[clip]["limit"], steps[clip + 1]["limit"]) == (10.0, 0.25)
    assert (steps[layer]["bf16"], steps[layer + 1]["bf16"]) == ([False, False], [True, False])
    assert (steps[margin]["margin"], steps[margin + 1]["margin"]) == (0, 1)
    assert (steps[everything + 1]["bf16"], steps[back + 1]["bf16"]) == ([True, True], [False, False])
    assert all(step <= order.after + 25 for step, order in zip(applied, ACTIONS, strict=True))


def test_a_rank_that_hears_of_it_later_holds_the_others_back(four):
    (order,) = ORDERS["late"]
    answers = four.controller.answers("late", order.command)
    assert len({result.step for results in answers.values() for result in results}) == 1
    assert answers[0][0].step >= 10
    four.assert_one_state("late")


def test_an_action_that_one_rank_cannot_do_is_begun_by_none(four):
    cannot, can = ORDERS["veto"]
    statuses = [status for answers in four.statuses("veto", cannot) for status, _ in answers]
    assert sorted(statuses) == ["unavailable", "vetoed", "vetoed", "vetoed"]
    assert four.statuses("veto", cannot)[1][0][0] == "unavailable"
    assert four.statuses("veto", can)[0][-1] == ("applied", "ok")


def test_one_disarmed_rank_disarms_all(four):
    (order,) = ORDERS["disarmed"]
    assert four.statuses("disarmed", order) == [[("vetoed", "pending")]] * 4
    assert {tuple(line["lr"]) for line in four.steps("disarmed", 0)} == {(0.01,)}


def test_what_fails_on_all_ranks_fails_and_training_goes_on(four):
    (order,) = ORDERS["failing"]
    assert four.statuses("failing", order) == [[("failed", "pending")]] * 4
    assert four.ends("failing") == ["end"] * 4


@pytest.mark.parametrize("ranks", ["two", "four"])
def test_a_rank_that_ends_two_steps_before_the_others_holds_nobody_up(ranks, request):
    job: Launch = request.getfixturevalue(ranks)
    assert job.ends("unequal") == ["end"] * job.ranks
    lines = [job.lines("unequal", rank) for rank in range(job.ranks)]
    assert [rank[-1]["step"] for rank in lines] == [25, 23, *[25] * (job.ranks - 2)]
    assert all(rank[-1]["detach_seconds"] < 8.0 for rank in lines)
    job.assert_one_state("unequal")
    said = [hello for hello in job.controller.hellos["unequal"] if hello.rank == 0][-1]
    assert said.capabilities["hold_lr"].endswith("rank 1 has left the run")


def test_loss_scale(four):
    (order,) = ORDERS["scaler"]
    assert {answers[-1] for answers in four.statuses("scaler", order)} == {("applied", "ok")}
    four.assert_one_state("scaler")
    assert four.steps("scaler", 0)[-1]["loss_scale"] == 32.0


def test_halt_stops_all_ranks_at_one_step(four):
    assert four.ends("halt") == ["Halted 78"] * 4
    assert len({four.lines("halt", rank)[-1]["step"] for rank in range(4)}) == 1
    four.assert_one_state("halt")


@pytest.mark.parametrize(("ranks", "scenario"), [("four", "killed"), ("two", "lost")])
def test_survivors_of_a_killed_rank_train_on_in_no_state_of_their_own(ranks, scenario, request):
    """Killed when it was about to apply, or when the command had just come: the others stop before the next step."""
    job: Launch = request.getfixturevalue(ranks)
    assert job.ends(scenario) == ["RanksApart 85"] * (job.ranks - 1) + ["killed"]
    assert job.codes == [0] * (job.ranks - 1) + [-9]
    survivors = list(range(job.ranks - 1))
    assert len({len(job.steps(scenario, rank)) for rank in survivors}) == 1
    job.assert_one_state(scenario)
    assert {tuple(line["lr"]) for rank in survivors for line in job.steps(scenario, rank)} == {(0.01,)}


# case: DST-08
def test_gradients_that_are_bad_on_one_rank_are_left_out_on_all(two):
    two.assert_one_state("bad-gradients")
    assert [two.steps("bad-gradients", rank)[-1]["skipped"] for rank in range(2)] == [2, 2]
    lines = two.steps("bad-gradients", 0)
    assert lines[3]["checksum"] == lines[4]["checksum"] == lines[5]["checksum"] != lines[6]["checksum"]


def test_rollback_says_why_it_is_not_there(two):
    (order,) = ORDERS["rollback"]
    assert two.statuses("rollback", order) == [[("unavailable", "pending")]] * 2
    detail = two.controller.answers("rollback", order.command)[0][0].detail
    assert detail.startswith("several ranks: ")


def test_the_embedded_controller_acts_on_both_ranks(two):
    """The whole path: scales frozen on both ranks, found, repaired or left for BF16, and answered by both."""
    store = SqliteStore(two.folder / "fp8watch" / "runs" / "embedded" / "store.sqlite")
    try:
        actions = {record.id: record for record in store.read("embedded", ActionRecord)}
        results = list(store.read("embedded", CommandResult))
    finally:
        store.close()
    done = [record for record in actions.values() if record.status == "applied" and record.readback == "ok"]
    assert done, actions
    for record in done:
        applied = {r.rank: r.step for r in results if r.id == record.id and r.verb == "apply" and r.readback == "ok"}
        assert applied == {0: record.applied_step, 1: record.applied_step}
    two.assert_one_state("embedded")
