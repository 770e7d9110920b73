"""Checkpoints and rollback on real ranks, whole and sharded, over restarts with another number of ranks.

Launches share the folder: four ranks save and go back, two resume what four have left, then eight. Two and eight are
started by torchrun, and so are the four that it starts anew after all of them were terminated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_controller import Cut, Order
from real_ranks import Launch, command, launch

from fp8watch.checkpoints import manifest

TARGET = "step-00000010-attempt-0"
SCENARIOS = [
    "ddp", "fsdp", "dcp-background", "callback", "tp", "ddp-truncated", "fsdp-flipped", "ddp-missing", "ddp-full",
    "ddp-change", "owned", "hand", "dcp-begin", "dcp-begin-background", "ddp-halfway", "ddp-sigterm",
]  # fmt: skip


def goes_back(run: str) -> list[Order]:
    params = {"checkpoint": TARGET, "onset_step": 12}
    return [Order(command=command(run, 1, "rollback", params=params), after=13)]


ORDERS: dict[str, list[Order]] = {
    **{name: goes_back(name) for name in [*SCENARIOS, "ddp-preempted"]},
    "dcp-begin": [Order(command=command("dcp-begin", 1, "checkpoint_now"), after=16)],
    "dcp-begin-background": [
        Order(
            command=command("dcp-begin-background", 1, "rollback", params={"checkpoint": "step-00000015-attempt-0"}),
            after=19,
        )
    ],
    "ddp-full": [
        Order(command=command("ddp-full", 1, "checkpoint_now"), after=14),
        Order(command=command("ddp-full", 2, "checkpoint_now"), after=19),
    ],
    "ddp-change": [
        Order(
            command=command(
                "ddp-change",
                1,
                "rollback",
                params={"checkpoint": TARGET, "changes": [{"action": "hold_lr", "params": {"factor": 0.5}}]},
            ),
            after=13,
        )
    ],
    "fsdp": [
        *goes_back("fsdp"),
        Order(command=command("fsdp", 2, "tighten_clip", attempt=1, params={"max_norm": 0.01}), after=20),
    ],
    "wide": [
        Order(command=command("wide", 1, "hold_lr", params={"factor": 0.5}), after=4),
        Order(command=command("wide", 2, "tighten_clip", params={"max_norm": 0.1}), after=12),
        Order(command=command("wide", 3, "hold_lr", params={"factor": 0.1}, last_step=24), after=18),
    ],
    "disarm": [
        Order(command=command("disarm", 1, "hold_lr", params={"factor": 0.5}), after=4),
        Order(command=command("disarm", 2, "tighten_clip", params={"max_norm": 0.1}), after=13),
    ],
}
CUTS = {"wide": [Cut(rank=3, at=8), Cut(rank=5, at=16, is_for_good=True)]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saving")


@pytest.fixture(scope="module")
def four(folder: Path) -> Launch:
    return launch("saving_program.py", 4, SCENARIOS, folder, ORDERS)


@pytest.fixture(scope="module")
def two(four: Launch) -> Launch:
    names = [
        "resume:ddp", "resume:fsdp", "resume:dcp-background", "resume:owned", "resume:hand", "resume:ddp-sigterm",
    ]  # fmt: skip
    return launch("saving_program.py", 2, names, four.folder, {}, with_torchrun=True)


@pytest.fixture(scope="module")
def eight(two: Launch) -> Launch:
    names = ["resume:ddp", "wide", "disarm"]
    return launch("saving_program.py", 8, names, two.folder, ORDERS, cuts=CUTS, with_torchrun=True)


@pytest.fixture(scope="module")
def preempted(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    folder = tmp_path_factory.mktemp("preempted")
    return launch("saving_program.py", 4, ["ddp-preempted"], folder, ORDERS, with_torchrun=True, restarts=1)


def labels(job: Launch, name: str) -> dict[str, tuple[str, str]]:
    ledger = json.loads((job.folder / "saved" / name / "ledger.json").read_text())
    return {item["checkpoint"]: (item["label"], item["reason"]) for item in ledger["checkpoints"]}


def made(job: Launch, name: str, rank: int) -> list[dict[str, Any]]:
    return [line for line in job.steps(name, rank) if "step" in line]


def last(job: Launch, name: str, order: Order) -> dict[int, Any]:
    return {rank: results[-1] for rank, results in job.controller.answers(name, order.command).items()}


WITHOUT_DAMAGE = ["ddp", "fsdp", "dcp-background", "callback", "tp", "owned"]


@pytest.mark.parametrize("name", [*WITHOUT_DAMAGE, "hand"])
def test_all_ranks_go_back_at_one_step_and_repeat_it_bit_by_bit(four: Launch, name: str) -> None:
    """Loss, gradient norm, parameters, samples, learning rate and random numbers of each rank are those of before."""
    assert four.ends(name) == ["end"] * 4
    (order, *_) = ORDERS[name]
    answers = last(four, name, order)
    assert {(r.status, r.readback, r.detail) for r in answers.values()} == {("applied", "ok", "")}
    assert len({r.step for r in answers.values()}) == 1
    drawn = set()
    for rank in range(4):
        lines = made(four, name, rank)
        first = {line["step"]: line for line in lines if line["attempt"] == 0}
        again = {line["step"]: line for line in lines if line["attempt"] == 1}
        both = sorted(set(first) & set(again))
        assert both[0] == 11
        assert len(both) >= 3
        for step in both:
            assert {**first[step], "attempt": 1} == again[step], (rank, step)
        assert max(again) == 30
        drawn.add(first[11]["drawn"])
    assert len(drawn) == (1 if name == "tp" else 4)  # case: CKP-11


@pytest.mark.parametrize("name", WITHOUT_DAMAGE)
def test_norm_and_limit_are_the_same_on_all_ranks(four: Launch, name: str) -> None:
    norms = [[(line["step"], line["norm"], line["limit"]) for line in made(four, name, rank)] for rank in range(4)]
    assert all(rank == norms[0] for rank in norms)


def test_a_tighter_clip_reaches_sharded_gradients(four: Launch) -> None:
    order = ORDERS["fsdp"][1]
    answers = last(four, "fsdp", order)
    assert {(r.status, r.readback) for r in answers.values()} == {("applied", "ok")}
    observed = answers[0].observed
    assert observed["norm_before"] > 0.01
    assert observed["norm_after"] == pytest.approx(0.01, rel=1e-2)


def test_what_a_checkpoint_of_several_ranks_holds(four: Launch) -> None:
    ddp = manifest.read(four.folder / "saved" / "ddp" / TARGET)
    fsdp = manifest.read(four.folder / "saved" / "fsdp" / TARGET)
    dcp = manifest.read(four.folder / "saved" / "dcp-background" / TARGET)
    assert (ddp.world_size, ddp.layout, fsdp.layout, dcp.storage) == (4, "replicas", "shards", "dcp")
    assert len({part.optimizer_file for part in ddp.ranks}) == 1
    optimizer = ddp.ranks[0].optimizer_file
    assert set(ddp.files) == {"model.pt", optimizer, *(f"state-{rank:05d}.pt" for rank in range(4))}
    owned = manifest.read(four.folder / "saved" / "owned" / TARGET)
    assert len({part.optimizer_file for part in owned.ranks}) == 4
    assert {"model-00002.pt", "optimizer-00002.pt"} < set(fsdp.files)
    assert {"dcp/.metadata", "dcp/__3_0.distcp"} < set(dcp.files)
    assert ddp.samples == 10 * 4 * 4  # of all ranks
    assert len({part.parameter_checksum for part in ddp.ranks}) == 1
    assert len({part.parameter_checksum for part in fsdp.ranks}) == 4
    assert len({part.rng_sha256 for part in ddp.ranks}) == 4  # case: CKP-11


# case: CKP-14
@pytest.mark.parametrize("name", ["dcp-begin", "dcp-begin-background"])
def test_no_rank_begins_what_one_cannot_begin(four: Launch, name: str) -> None:
    """Nobody waits for it, the reason is said on all ranks, and the next ones are saved and restored."""
    assert four.ends(name) == ["end"] * 4
    saved = labels(four, name)
    assert TARGET not in saved
    assert saved["step-00000015-attempt-0"][0] == "candidate"
    assert "pending" not in {label for label, _ in saved.values()}
    for rank in range(4):
        assert four.lines(name, rank)[-1]["failures"] == {"checkpoints": 1}
        said = (four.folder / f"stderr-{rank}").read_text()
        assert "checkpoint of step 10 could not be saved: rank 1: [Errno 28] No space left on device" in said
    answers = last(four, name, ORDERS[name][0])
    assert {(r.status, r.readback, r.detail) for r in answers.values()} == {("applied", "ok", "")}


# case: CKP-03
def test_a_checkpoint_is_pending_until_every_part_of_it_is_durable(four: Launch) -> None:
    told = [(r.checkpoint, r.label) for r in four.controller.checkpoints["dcp-background"] if r.attempt == 0]
    assert (TARGET, "pending") in told
    assert told.index((TARGET, "pending")) < told.index((TARGET, "candidate"))


# case: CKP-02, STA-06, CKP-18
@pytest.mark.parametrize("name", ["ddp-truncated", "fsdp-flipped", "ddp-missing"])
def test_a_damaged_shard_is_refused_by_all_and_the_next_older_one_taken(four: Launch, name: str) -> None:
    """One rank's file is damaged, so that the others find theirs sound."""
    assert four.ends(name) == ["end"] * 4
    answers = last(four, name, ORDERS[name][0])
    assert {(r.status, r.readback) for r in answers.values()} == {("applied", "ok")}
    assert {r.observed["checkpoint"] for r in answers.values()} == {"step-00000005-attempt-0"}
    label, reason = labels(four, name)[TARGET]
    assert label == "tainted"
    assert reason.startswith("damaged: ")
    for rank in range(4):
        assert next(line["step"] for line in made(four, name, rank) if line["attempt"] == 1) == 6


# case: CKP-14
def test_a_full_disk_on_one_rank_costs_one_checkpoint_and_nothing_else(four: Launch) -> None:
    """At step 10 by the cadence, at step 16 for an action; the next ones are saved again."""
    assert four.ends("ddp-full") == ["end"] * 4
    saved = labels(four, "ddp-full")
    assert TARGET not in saved
    assert saved["step-00000015-attempt-0"][0] == "candidate"
    assert not list((four.folder / "saved" / "ddp-full").glob(".unfinished*"))
    assert four.lines("ddp-full", 1)[-1]["failures"]["checkpoints"] >= 1
    failed, done = ORDERS["ddp-full"]
    assert {r.status for r in last(four, "ddp-full", failed).values()} == {"failed"}
    assert {(r.status, r.readback) for r in last(four, "ddp-full", done).values()} == {("applied", "ok")}


def test_what_one_rank_cannot_change_for_the_replay_no_rank_changes(four: Launch) -> None:
    answers = last(four, "ddp-change", ORDERS["ddp-change"][0])
    assert {(r.status, r.readback) for r in answers.values()} == {("applied", "failed")}
    assert "no room for it" in answers[2].detail
    assert "failed on another rank" in answers[0].detail
    lines = [made(four, "ddp-change", rank) for rank in range(4)]
    assert all([a["checksum"] for a in rank] == [b["checksum"] for b in lines[0]] for rank in lines)


def test_a_rank_that_fails_while_it_restores_stops_all(four: Launch) -> None:
    assert four.ends("ddp-halfway") == ["RanksApart 85", "Halted 78", "RanksApart 85", "RanksApart 85"]
    steps = {max(line["step"] for line in made(four, "ddp-halfway", rank)) for rank in range(4)}
    assert len(steps) == 1


def test_a_rank_that_is_terminated_in_mid_restore_stops_the_others(four: Launch) -> None:
    assert four.ends("ddp-sigterm")[:3] == ["RanksApart 85 after it"] * 3
    assert four.codes == [0, 0, 0, -15]


# case: CKP-16
def test_copies_are_resumed_by_fewer_ranks(two: Launch) -> None:
    """Four ranks have consumed 30 x 4 x 4 samples: two go on behind them."""
    first = [two.lines("resume-ddp", rank)[0] for rank in range(2)]
    assert [line["resumed"] for line in first] == [30, 30]
    assert len({line["attempt"] for line in first}) == 1
    assert first[0]["attempt"] >= 2
    lines = [made(two, "resume-ddp", rank) for rank in range(2)]
    assert [line["step"] for line in lines[0]] == list(range(31, 41))
    assert [a["checksum"] for a in lines[0]] == [b["checksum"] for b in lines[1]]
    assert lines[0][0]["drawn"] != lines[1][0]["drawn"]
    seen = {sample for rank in range(4) for line in made(two, "ddp", rank) for sample in line["ids"]}
    fresh = [sample for rank in lines for line in rank[:2] for sample in line["ids"]]
    assert not seen & set(fresh)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("owned", "each of 4 ranks had optimizer state of its own, which cannot be assigned to 2 ranks"),
        ("hand", "differed between ranks when it was saved, and there are more or fewer ranks now"),
    ],
)
def test_what_each_rank_had_of_its_own_is_refused_by_another_number_of_ranks(
    two: Launch, name: str, reason: str
) -> None:
    for rank in range(2):
        ended = two.lines(f"resume-{name}", rank)[-1]["ended"]
        assert ended.startswith("CheckpointError")
        assert reason in ended
    assert {label for label, _ in labels(two, name).values()} <= {"candidate", "tainted"}
    assert labels(two, name)["step-00000030-attempt-1"][0] == "candidate"


def test_shards_are_refused_by_another_number_of_ranks_with_the_reason(two: Launch) -> None:
    for rank in range(2):
        ended = two.lines("resume-fsdp", rank)[-1]["ended"]
        assert "sharded over 4 ranks, here are 2" in ended
        assert made(two, "resume-fsdp", rank) == []


# case: CKP-16
def test_distributed_checkpoints_are_resharded(two: Launch) -> None:
    assert [two.lines("resume-dcp-background", rank)[0]["resumed"] for rank in range(2)] == [30, 30]
    before, after = made(two, "dcp-background", 0)[-1], made(two, "resume-dcp-background", 0)[0]
    assert after["step"] == 31
    assert after["lr"] == before["lr"]
    assert after["loss"] < made(two, "dcp-background", 0)[0]["loss"]


def test_what_was_terminated_in_mid_action_is_taken_up(two: Launch) -> None:
    """Nothing that was half restored is gone on with, and the action is not tried again."""
    assert [two.lines("resume-ddp-sigterm", rank)[0]["resumed"] for rank in range(2)] == [10, 10]
    assert two.ends("resume-ddp-sigterm") == ["end after it"] * 2
    unknown = [r for r in two.controller.results["ddp-sigterm"] if r.status == "unknown"]
    assert {r.id for r in unknown} == {"rollback-1"}


def test_an_elastic_restart_goes_on_after_all_ranks_were_terminated_in_mid_restore(preempted: Launch) -> None:
    """torchrun starts four new processes: they take up the state before the action, bit by bit, and finish."""
    assert preempted.codes == [0]
    for rank in range(4):
        before, again = (preempted.lines(name, rank) for name in ("ddp-preempted", "ddp-preempted-again"))
        assert not any("ended" in line for line in before)
        assert (again[-1]["ended"], again[-1]["step"]) == ("end", 20)
        first = {line["step"]: line for line in before if "step" in line}
        both = [line for line in again if line.get("step") in first and "loss" in line]
        # On a busy machine the command comes a boundary later, and step 15 is saved before it.
        resumed = again[0]["resumed"]
        assert resumed == 10 or (resumed == 15 and max(first) >= 15)
        assert [line["step"] for line in both] == list(range(resumed + 1, max(first) + 1))
        assert both or resumed == 15
        assert all({**line, "attempt": 0} == first[line["step"]] for line in both)
    begun = [preempted.lines("ddp-preempted-again", rank)[0] for rank in range(4)]
    assert len({(line["attempt"], line["resumed"]) for line in begun}) == 1
    unknown = [r for r in preempted.controller.results["ddp-preempted"] if r.status == "unknown"]
    assert {(r.id, r.rank) for r in unknown} == {("rollback-1", rank) for rank in range(4)}


def test_copies_are_resumed_by_more_ranks(eight: Launch) -> None:
    """Ranks without a part of their own draw other numbers than the one whose part they take."""
    first = [eight.lines("resume-ddp", rank)[0] for rank in range(8)]
    assert {line["resumed"] for line in first} == {40}
    assert len({line["attempt"] for line in first}) == 1  # case: DST-01


def test_an_agent_that_was_away_is_caught_up_with(eight: Launch) -> None:
    """The connection of rank 3 ended between two commands."""
    hold, clip, _ = ORDERS["wide"]
    for order in (hold, clip):
        answers = last(eight, "wide", order)
        assert sorted(answers) == list(range(8)), order.command.action
        assert {(r.status, r.readback) for r in answers.values()} == {("applied", "ok")}
        assert len({r.step for r in answers.values()}) == 1
    lines = [made(eight, "wide", rank) for rank in range(8)]
    assert all([a["checksum"] for a in rank] == [b["checksum"] for b in lines[0]] for rank in lines)


def test_a_command_that_does_not_reach_one_rank_is_begun_by_none(eight: Launch) -> None:
    """The agent of rank 5 is gone for good: the others let the command expire."""
    answers = last(eight, "wide", ORDERS["wide"][2])
    assert 5 not in answers
    assert {r.status for r in answers.values()} == {"expired"}
    assert all(line["used"][0] >= 0.5 * line["lr"][0] * 0.9 for line in made(eight, "wide", 5)[-3:])


def test_disarming_stops_every_vote_from_the_next_boundary_on(eight: Launch) -> None:
    hold, clip = ORDERS["disarm"]
    assert {(r.status, r.readback) for r in last(eight, "disarm", hold).values()} == {("applied", "ok")}
    answers = last(eight, "disarm", clip)
    assert {r.status for r in answers.values()} == {"vetoed"}
    assert all("disarm" in r.detail for r in answers.values())
