"""A checkpoint that was saved inside an incident is no place to go back to: not while nobody knows that the incident is
over, and not afterwards, as its label would say nothing about the state in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from controller_sim import Box, Rank, Signal
from hypothesis import given
from hypothesis import strategies as st

from fp8watch.controller.checkpoints import Ledger
from fp8watch.controller.service import RunController
from fp8watch.detect.base import Sample
from fp8watch.policy.view import Trouble
from fp8watch.records import CheckpointRecord, Hello, StepFrame

HEAD = "version: 1\nmode: {mode}\nhealthy_steps: 8\nbudgets: {{actions_per_1000_steps: 20, rollbacks_per_24h: 9}}\n"
HEAL = "\nrules:\n  - name: loss\n    when: {{detector: loss_spike, severity: act}}\n    ladder:\n"
AGAIN = "  - name: later\n    when: {{detector: divergence, severity: act}}\n    ladder: [{{action: rollback}}]\n"


def policy(*rungs: str, mode: str = "auto", more: str = "") -> str:
    lines = "".join(f"      - {{{{{rung}}}}}\n" for rung in rungs)
    return (HEAD + HEAL + (lines or "      []\n") + more + AGAIN).format(mode=mode)


Numbers = Callable[[int, Rank], dict[str, float]]


def box(
    text: str,
    *,
    seen: Iterable[int] = range(100, 105),
    cause: str = "unknown",
    later: int | None = None,
    saved: Iterable[int] = range(10, 600, 10),
    onsets: dict[str, int] | None = None,
    numbers: Numbers = lambda step, rank: {},
    **options: Any,
) -> Box:
    """A loss spike in the steps `seen` of the first attempt, and a divergence at `later`."""
    steps = set(seen)

    def script(sample: Sample) -> Iterable[Signal]:
        if sample.step in steps and sample.attempt == 0:
            yield ("loss_spike", cause, ())
        if later is not None and later <= sample.step < later + 3 and sample.attempt == 0:
            yield ("divergence", "unknown", ())

    return Box(text, numbers=numbers, script=script, onsets=onsets, checkpoint_steps=saved, **options)


def labels(run: Box) -> dict[int, str]:
    return {record.step: record.label for record in run.store.read("r", CheckpointRecord)}


def reason(run: Box, step: int) -> str:
    return [record.reason for record in run.store.read("r", CheckpointRecord) if record.step == step][-1]


HOLD = "action: hold_lr, factor: 0.5, settle_steps: 60"


def test_a_remedy_that_is_still_being_judged() -> None:
    run = box(policy(HOLD))
    run.run(158)
    assert run.actions("hold_lr")[0].outcome == "pending"
    assert labels(run)[120] == "tainted", "the detectors still had it"
    assert labels(run)[130] == labels(run)[150] == "candidate"
    assert reason(run, 130).startswith("saved inside loss_spike of step 100: hold_lr")
    run.run(300)
    assert run.actions("hold_lr")[0].outcome == "helped"
    assert labels(run)[130] == labels(run)[160] == "candidate", "saved before there was evidence"
    assert labels(run)[170] == "good"
    sent = {update.checkpoint: update.label for update in run.rank.updates}
    assert sent["a0-s130"] == "candidate"


def test_a_later_rollback_does_not_go_to_it() -> None:
    run = box(policy(HOLD), later=185, saved=(80, 95, 130, 150))
    run.run(200)
    (rollback,) = run.actions("rollback")
    assert rollback.params["checkpoint_step"] == 80


def test_a_candidate_may_still_be_gone_back_to_where_the_policy_says_so() -> None:
    text = policy(HOLD).replace(
        "ladder: [{action: rollback}]", "ladder: [{action: rollback, if_none_is_good: candidate}]"
    )
    run = box(text, later=185, saved=(130, 150))
    run.run(200)
    (rollback,) = run.actions("rollback")
    assert rollback.params["checkpoint_step"] == 150


@pytest.mark.parametrize("answer", ["refuse", "approve", None])
def test_a_question_that_nobody_has_answered(answer: str | None) -> None:
    more = "    approval: {{timeout_steps: 80, default: refuse}}\n"
    run = box(policy("action: hold_lr, factor: 0.5, settle_steps: 10", mode="approve", more=more))
    run.run(150)
    (asked,) = run.actions("hold_lr")
    assert labels(run)[130] == "candidate"
    assert reason(run, 130) == f"saved inside loss_spike of step 100: a person was asked about hold_lr ({asked.id})"
    pilot = run.controller._runs["r"].pilot
    if answer is not None:
        pilot.verdicts = {asked.id: answer}
        run.controller._look = lambda run: None  # type: ignore[method-assign]
    run.run(260)
    assert labels(run)[130] == "candidate"
    over = {"refuse": 160, "approve": 170, None: 190}[answer]
    assert labels(run)[over] == "good", "the silence of a person does not hold it for ever"


def test_the_loss_never_came_back_and_no_rung_is_left() -> None:
    def numbers(step: int, rank: Rank) -> dict[str, float]:
        return {"loss": 3.0 if 100 <= step < 300 else 2.0}

    run = box(policy("action: hold_lr, factor: 0.5, settle_steps: 30, verify: {{loss_within: 0.1}}"), numbers=numbers)
    run.run(290)
    assert run.actions("hold_lr")[0].outcome == "no_effect"
    assert {labels(run)[step] for step in range(140, 290, 10)} == {"candidate"}
    assert "the loss was still more than 10% above its level before" in reason(run, 200)
    run.run(350)
    assert labels(run)[310] == "good"
    assert labels(run)[280] == "candidate"


def test_it_helped_but_nothing_is_left_for_the_damage() -> None:
    def numbers(step: int, rank: Rank) -> dict[str, float]:
        return {"loss": 3.0 if 100 <= step < 300 else 2.0}

    repair = "action: rollback, if_loss_above: 0.1, requires: {{from_step: 5000}}"
    run = box(policy("action: hold_lr, factor: 0.5, settle_steps: 30", repair), numbers=numbers)
    run.run(340)
    assert run.actions("hold_lr")[0].outcome == "helped"
    assert run.actions("rollback")[0].status == "unavailable"
    assert {labels(run)[step] for step in range(140, 300, 10)} == {"candidate"}
    assert labels(run)[320] == "good"


def test_a_loss_that_stays_high_holds_them_only_as_long_as_it_can_be_compared() -> None:
    def numbers(step: int, rank: Rank) -> dict[str, float]:
        return {"loss": 3.0 if step >= 100 else 2.0}

    text = policy("action: hold_lr, factor: 0.5, settle_steps: 30, verify: {{loss_within: 0.1}}")
    run = box(text, numbers=numbers, saved=range(100, 1300, 50))
    run.run(1250)
    assert labels(run)[1000] == "candidate"
    assert labels(run)[1200] == "good"


def test_bad_data_heals_and_those_saved_in_it_are_not_called_good() -> None:
    run = box(policy(), seen=range(100, 125), cause="data")
    run.run(118)
    assert labels(run)[110] == "candidate"
    run.run(300)
    assert {labels(run)[step] for step in (100, 110, 120, 130, 140)} == {"candidate"}
    assert "saved inside loss_spike of step 100" in reason(run, 110)
    assert labels(run)[150] == "good"


def test_good_before_the_alarm_is_not_good_after_it() -> None:
    run = box(policy(), seen=range(120, 125), cause="data", onsets={"loss_spike": 105})
    run.run(119)
    assert labels(run)[110] == "good"
    run.run(121)
    assert labels(run)[110] == "candidate"


def test_healthy_steps_that_were_none_do_not_become_so_when_the_incident_is_over() -> None:
    run = box(policy(), saved=(90, 96, 150))
    run.run(300)
    assert labels(run) == {90: "good", 96: "candidate", 150: "good"}
    assert reason(run, 96) == "loss_spike began at step 100, within its healthy steps"


def test_what_becomes_known_late_gets_the_same_label() -> None:
    for cause, expected in (("unknown", "candidate"), ("data", "candidate")):
        run = box(policy(), cause=cause, saved=())
        run.run(140)
        late = CheckpointRecord(run="r", attempt=0, checkpoint="late", step=110, path="/c", label="candidate")
        run.controller.receive(late)
        run.run(160)
        assert labels(run)[110] == expected


@pytest.mark.parametrize("mode", ["observe", "auto"])
def test_an_incident_that_nobody_acts_on_ends_with_its_symptoms(mode: str) -> None:
    run = box(policy(HOLD, mode=mode).replace("loss_spike", "stuck" if mode == "auto" else "loss_spike"))
    run.run(200)
    assert [record.status for record in run.actions()] == (["proposed"] if mode == "observe" else [])
    assert labels(run)[130] == "good"


def test_an_incident_without_end_is_named_at_every_checkpoint() -> None:
    run = box(policy(), seen=range(100, 3000), saved=range(100, 3000, 100))
    run.run(2500, limit=3000)
    assert {labels(run)[step] for step in range(100, 2500, 100)} == {"tainted"}
    assert reason(run, 2400) == "saved at or after the onset of loss_spike at step 100"


def test_the_replay_of_a_rollback_is_not_known_to_be_good_before_it_is_judged() -> None:
    run = box(policy("action: rollback, settle_steps: 60"))
    run.run(101)
    run.run(155)
    assert run.actions("rollback")[0].outcome == "pending"
    assert labels(run)[100] == labels(run)[110] == labels(run)[140] == "candidate"
    assert reason(run, 110).startswith("waits until loss_spike of step 100 has been passed without it: ")
    run.run(260)
    assert run.actions("rollback")[0].outcome == "helped"
    assert {labels(run)[step] for step in range(10, 250, 10)} == {"good"}, "it did not come back: nothing was inside"


# A restart of the controller, or of the training


def restarted(run: Box, *, start: str = "", step: int | None = None, attempt: int | None = None) -> None:
    """Another process decides from here on; with `step` the training is another one too."""
    if step is not None:
        run.controller.lost("r", 0)
        run.rank.step, run.rank.attempt, run.rank.start = step, attempt or 0, start
    extra: dict[str, Any] = {"make_pipeline": lambda name: run.pipeline}
    assert run.pipeline is not None
    run.pipeline._open.clear()
    run.controller = RunController(run.store, clock=lambda: run.now, **extra)
    run._hello()


def test_a_controller_that_is_restarted_knows_what_was_not_over() -> None:
    run = box(policy(HOLD))
    run.run(140)
    restarted(run)
    run.run(300)
    assert labels(run)[130] == labels(run)[140] == labels(run)[150] == "candidate"
    assert labels(run)[190] == "good", "nobody judges the remedy any more: forty steps without an alarm will do"


def test_a_controller_that_is_restarted_keeps_what_it_had_found_out() -> None:
    run = box(policy(), seen=range(100, 125), cause="data", saved=(96, 110, 210))
    run.run(160)
    restarted(run)
    run.run(300)
    assert labels(run) == {96: "candidate", 110: "candidate", 210: "good"}


def test_training_that_is_restarted_passes_the_same_step_again() -> None:
    """In the quiet time after a resume the rules that rest on a baseline say nothing."""
    run = box(policy())
    run.run(101)
    restarted(run, start="b", step=90, attempt=1)
    run.run(115)
    assert labels(run)[80] == "good"
    assert labels(run)[100] == "candidate"
    run.run(200)
    assert labels(run)[100] == labels(run)[110] == labels(run)[150] == "good"


def test_training_that_goes_on_from_inside_an_incident_has_it_still() -> None:
    run = box(policy(), seen=range(100, 125), cause="data")
    run.run(111)
    restarted(run, start="b", step=110, attempt=1)
    run.run(309)
    inside = [step for step, label in labels(run).items() if label != "good" and step < 300]
    assert inside == [100, 110, 120, 130, 140, 150]
    assert labels(run)[160] == "good"


def test_with_several_ranks_it_counts_what_the_last_of_them_has_seen() -> None:
    """Rank 0 announces a checkpoint while the other is eight steps behind: those steps are judged when it has come."""
    text = policy("action: hold_lr, factor: 0.5, settle_steps: 10", mode="approve")
    run = box(text, saved=())
    for rank in (0, 1):
        run.controller.receive(
            Hello(
                wire_version=1, run="q", attempt=0, rank=rank, local_rank=rank, world_size=2, pid=rank + 1, host="h",
                time_unix=1.0, step=0, policy=text, policy_name="test", capabilities={},
            )
        )  # fmt: skip
    for step in range(1, 165):
        for rank, there in ((0, step), (1, step - 8)):
            if there > 0:
                frame = StepFrame(
                    run="q", attempt=0, rank=rank, step=there, layout_id=0, time_unix=1.0, scalars={"loss": 2.0}
                )
                run.controller.receive(frame)
        if step in (91, 104, 136):
            saved = CheckpointRecord(run="q", attempt=0, checkpoint=f"c{step}", step=step, path="/c", label="candidate")
            run.controller.receive(saved)
    found = {record.step: record.label for record in run.store.read("q", CheckpointRecord)}
    assert found == {91: "good", 104: "tainted", 136: "candidate"}


happenings = st.lists(
    st.tuples(
        st.integers(1, 60), st.integers(0, 6), st.integers(1, 15), st.integers(0, 25),
        st.sampled_from(("data", "unknown")),
    ),
    max_size=4,
)  # fmt: skip


@given(happenings, st.lists(st.tuples(st.integers(1, 90), st.integers(0, 20)), max_size=12), st.integers(0, 9))
def test_whatever_happens_none_is_good_that_an_incident_touches_and_all_others_are(
    incidents: list[tuple[int, int, int, int, str]], saved: list[tuple[int, int]], healthy: int
) -> None:
    """Incidents are found late, and unresolved for some steps after they were closed; checkpoints are heard of late."""
    ledger, lasts = Ledger(healthy), {}
    for name, (onset, delay, length, unresolved, _) in enumerate(incidents):
        lasts[f"i{name}"] = (onset + delay + length, onset + delay + length + unresolved)
    records = {
        step: CheckpointRecord(run="r", attempt=0, checkpoint=f"c{step}", step=step, path="/c", label="candidate")
        for step, _ in saved
    }
    for now in range(1, 140):
        for step, delay in saved:
            if step + delay == now:
                ledger.add(records[step])
        troubles = [
            Trouble(
                incident=f"i{name}", detector="loss_spike", cause=cause, severity="act", onset_step=onset,
                first_step=onset + delay, last_seen_step=now,
            )
            for name, (onset, delay, length, _, cause) in enumerate(incidents)
            if onset + delay <= now < onset + delay + length
        ]  # fmt: skip
        ledger.passed(now, troubles, lambda name, now=now: "open" if now < lasts[name][1] else None)  # type: ignore[misc]
        for record in ledger.records():
            touching = [
                name
                for name, (onset, delay, *_) in enumerate(incidents)
                if onset + delay <= now and onset - healthy <= record.step <= lasts[f"i{name}"][1]
            ]
            if record.label == "good":
                assert not touching
            elif now > max(record.step + healthy, *(step + delay for step, delay in saved if step == record.step)):
                assert touching, f"step {record.step}: {record.reason}"
                assert record.reason
