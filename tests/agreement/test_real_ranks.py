"""Real processes over gloo: what a command does on all of them, and what happens when one is missing.

Two launches, of two and of four ranks, play all scenarios one after the other; the tests look at what they wrote.
"""

from __future__ import annotations

import math

import pytest
from fake_controller import Order
from real_ranks import Launch, command, in_turn, launch

from fp8watch.controller.service import RunController
from fp8watch.controller.stores.memory import MemoryStore
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.records import ActionRecord, CommandResult, Finding

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
    "halt": in_turn("halt", ("halt", {"params": {"reason": "test"}})),
    "killed": in_turn("killed", ("hold_lr", {"params": {"factor": 0.5}})),
    "stages": in_turn(
        "stages",
        ("tighten_clip", {"params": {"max_norm": 0.25}}),
        ("bf16_layers", {"params": {"layers": ["stage1"]}}),
        ("repair_scale", {"params": {"tensors": ["stage0:input"]}}),
        ("bf16_layers", {"params": {"layers": ["stage0", "stage7"]}}),
        ("bf16_all", {}),
    ),
    "lost": [Order(command=command("lost", 1, "hold_lr", params={"factor": 0.5}), late={1: 12})],
}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    names = ["actions", "late", "veto", "disarmed", "failing", "unequal", "scaler", "halt", "killed"]
    return launch("rank_program.py", 4, names, tmp_path_factory.mktemp("four"), ORDERS)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    names = ["embedded", "bad-gradients", "unequal", "apart", "stages", "lost"]
    return launch("rank_program.py", 2, names, tmp_path_factory.mktemp("two"), ORDERS)


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


def test_clipping_under_a_pipeline_is_by_the_norm_of_all_stages(two):
    """In the loop's own call, and by the optimizer's wrapper once the loop clips no more and a remedy does."""
    tighten = ORDERS["stages"][0]
    assert two.statuses("stages", tighten) == [[("applied", "pending"), ("applied", "ok")]] * 2
    begun = two.controller.answers("stages", tighten.command)[0][0].step
    first, second = two.steps("stages", 0), two.steps("stages", 1)
    for a, b in zip(first, second, strict=True):
        together = math.hypot(a["own_norm_after"], b["own_norm_after"])
        if a["norm"] is not None:
            assert a["norm"] == b["norm"] > 2.0
            assert together == pytest.approx(0.25 if a["step"] > begun else 2.0, rel=1e-3)
        elif a["step"] > begun:
            assert together == pytest.approx(0.25, rel=1e-3)
        else:
            assert together > 2.0
    assert any(line["norm"] is None and line["step"] > begun for line in first)


def test_an_action_on_what_one_stage_holds_is_nothing_on_the_others(two):
    """And one on what no rank holds fails on all of them."""
    _, layer, repair, unknown, everything = ORDERS["stages"]
    for order in (layer, repair, everything):
        assert [answers[-1] for answers in two.statuses("stages", order)] == [("applied", "ok")] * 2
    assert two.statuses("stages", unknown) == [[("failed", "pending")]] * 2
    answers = two.controller.answers("stages", layer.command)
    begun, to_all = answers[0][0].step, two.controller.answers("stages", everything.command)[0][0].step
    assert [answers[rank][-1].observed["modules"] for rank in range(2)] == [0, 1]
    lines = [{line["step"]: line["bf16"] for line in two.steps("stages", rank)} for rank in range(2)]
    assert [rank[begun + 1] for rank in lines] == [[False], [True]]
    assert [rank[to_all + 1] for rank in lines] == [[True], [True]]
    assert two.ends("stages") == ["end"] * 2


def found_by_a_controller(job: Launch, scenario: str) -> list[Finding]:
    """What it makes of all that the ranks have sent."""
    store, told = MemoryStore(), job.controller
    controller = RunController(store, clock=lambda: 1.0)
    frames = sorted(told.frames[scenario], key=lambda frame: (frame.step, frame.rank))
    assert len(frames) >= 20 * job.ranks
    for message in [*told.hellos[scenario][: job.ranks], *told.layouts[scenario], *frames]:
        controller.receive(message)
    return [finding for finding in store.read(scenario, Finding) if finding.detector == "rank_mismatch"]


# case: COM-05
def test_ranks_that_share_tensors_and_not_their_scales_are_named(two, four):
    """Amaxes are not reduced over the ranks that hold parts of one tensor. Where they are, nothing is said."""
    (finding,) = found_by_a_controller(two, "apart")
    assert (finding.severity, finding.cause, finding.rank) == ("warn", "bookkeeping", None)
    assert (finding.evidence["ranks"], finding.evidence["of"]) == ([0, 1], "scale_checksum")
    assert finding.onset_step <= 3
    assert {tuple(hello.tensor_group) for hello in four.controller.hellos["actions"]} == {(0, 1), (2, 3)}
    assert found_by_a_controller(four, "actions") == []


# case: DST-08
# case: SPK-03
def test_gradients_that_are_bad_on_one_rank_are_left_out_on_all(two):
    two.assert_one_state("bad-gradients")
    assert [two.steps("bad-gradients", rank)[-1]["skipped"] for rank in range(2)] == [2, 2]
    lines = two.steps("bad-gradients", 0)
    assert lines[3]["checksum"] == lines[4]["checksum"] == lines[5]["checksum"] != lines[6]["checksum"]


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
