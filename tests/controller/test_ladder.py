"""The ladder with an obedient rank: settle, judge, undo, next rung; one action at a time; returns one by one."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from controller_sim import Box, Rank, Signal

from fp8watch.detect.base import Sample

SCALES = """
version: 1
mode: {mode}
budgets: {{actions_per_1000_steps: {actions}, rollbacks_per_24h: {rollbacks}, rollbacks_per_checkpoint: 1}}
rules:
  - name: scales
    when: {{detector: scale_frozen, severity: act, cause: [bookkeeping, precision]}}
    ladder:
      - {{action: repair_scale, scope: tensor, settle_steps: 10}}
      - {{action: bf16_layers, scope: layer, max_share: 1.0, settle_steps: 20, hold_steps: {hold}}}
      - {{action: rollback, settle_steps: 10}}
  - name: loss
    when: {{detector: [loss_spike, divergence], severity: act}}
    ladder:
      - {{action: rollback, settle_steps: 10}}
"""


BF16 = """
version: 1
mode: auto
rules:
  - name: scales
    when: {detector: scale_frozen, severity: act}
    ladder:
      - {action: bf16_layers, scope: layer, max_share: 1.0, settle_steps: 20}
      - {action: bf16_all, settle_steps: 20}
"""


def policy(mode: str = "auto", actions: int = 10, rollbacks: int = 5, hold: int = 500) -> str:
    return SCALES.format(mode=mode, actions=actions, rollbacks=rollbacks, hold=hold)


class Frozen:
    """Scales of two layers stuck from a step on. `cure`: the action that mends them; `bump_until`: a loss bump after
    the switch to BF16 that lasts so many steps."""

    def __init__(self, cure: str | None, *, at: int = 100, bump_steps: int = 0) -> None:
        self.cure, self.at, self.bump_steps = cure, at, bump_steps
        self.box: Box

    def build(self, text: str, **options: object) -> Box:
        self.box = Box(
            text, numbers=lambda step, rank: {}, script=self.signals, layers=("a", "b", "c"),
            checkpoint_steps=range(20, 600, 20), **options,  # type: ignore[arg-type]
        )  # fmt: skip
        return self.box

    def _applied(self, rank: Rank, action: str) -> int | None:
        steps = [step for step, c in rank.applied if c.action == action and c.verb == "apply"]
        return steps[-1] if steps else None

    def signals(self, sample: Sample) -> Iterable[Signal]:
        rank = self.box.rank
        is_cured = self.cure is not None and (
            self.cure in rank.in_force or (self.cure == "repair_scale" and self._applied(rank, self.cure) is not None)
        )
        if sample.step >= self.at and not is_cured and sample.attempt == 0:
            yield ("scale_frozen", "bookkeeping", ("a", "b"))
        switched = self._applied(rank, "bf16_layers")
        if switched is not None and switched < sample.step <= switched + self.bump_steps and sample.attempt == 0:
            yield ("loss_spike", "unknown", ())


def test_the_first_rung_that_helps_is_the_last() -> None:
    box = Frozen("repair_scale").build(policy())
    box.run(300)
    assert box.commanded() == [(100, "apply", "repair_scale")]
    (record,) = box.actions()
    assert (record.status, record.readback, record.outcome) == ("applied", "ok", "helped")
    assert record.params["tensors"] == ["a:input", "b:input"]
    assert record.settle_until == 110


def test_a_remedy_made_a_no_op_is_found_out_and_the_next_is_taken() -> None:
    box = Frozen("bf16_layers").build(policy())
    box.run(300)
    assert box.commanded() == [(100, "apply", "repair_scale"), (110, "apply", "bf16_layers")]
    repair, switch = box.actions()
    assert repair.outcome == "no_effect"
    assert switch.outcome == "helped"
    assert switch.params["layers"] == ["a", "b"]


def test_a_remedy_that_is_not_in_force_when_read_back_is_no_success() -> None:
    scene = Frozen("bf16_layers")
    box = scene.build(policy())
    box.rank.unread = ("repair_scale",)
    box.run(130)
    repair, switch = box.actions()
    assert (repair.status, repair.readback, repair.outcome) == ("failed", "failed", "no_effect")
    assert switch.decided_step <= repair.decided_step + 2, "the next rung does not wait for a settling window"


def test_what_was_applied_but_not_found_in_force_is_undone_before_the_next_rung() -> None:
    box = Frozen("bf16_all").build(BF16)
    box.rank.unread = ("bf16_layers",)
    box.run(140)
    assert [(verb, action) for _, verb, action in box.commanded()] == [
        ("apply", "bf16_layers"),
        ("revert", "bf16_layers"),
        ("apply", "bf16_all"),
    ]


def test_an_action_the_run_cannot_do_is_recorded_and_passed_over_at_once() -> None:
    box = Frozen("bf16_layers").build(policy(), capabilities={"repair_scale": "recipe keeps no scales"})
    box.run(150)
    first, second = box.actions()
    assert (first.action, first.status) == ("repair_scale", "unavailable")
    assert "recipe keeps no scales" in first.reason
    assert (second.action, second.decided_step) == ("bf16_layers", 100)


def test_nothing_helps_rollback_carries_the_fallback_along() -> None:
    box = Frozen(None).build(policy())
    box.run(200)
    assert [action for _, _, action in box.commanded()] == ["repair_scale", "bf16_layers", "rollback"]
    rollback = box.actions("rollback")[0]
    assert "kept in force: bf16_layers" in rollback.reason
    assert rollback.params["checkpoint_step"] == 80, "100 is not before the onset, 80 is"
    assert "bf16_layers" in box.rank.in_force


def test_the_bump_after_our_own_switch_is_not_acted_on() -> None:
    # case: NUM-27
    box = Frozen("bf16_layers", bump_steps=20).build(policy())
    box.run(400)
    assert [action for _, _, action in box.commanded()] == ["repair_scale", "bf16_layers"]
    assert box.actions("bf16_layers")[0].outcome == "helped"
    assert "bf16_layers" in box.rank.in_force


def test_a_bump_that_does_not_heal_escalates_and_keeps_the_fallback() -> None:
    # case: NUM-27
    box = Frozen("bf16_layers", bump_steps=200).build(policy())
    box.run(300)
    steps = {action: step for step, verb, action in box.commanded() if verb == "apply"}
    assert steps["rollback"] > steps["bf16_layers"] + 20, "not within the settling window"
    assert "bf16_layers" in box.rank.in_force
    assert all(verb == "apply" for _, verb, _ in box.commanded())


def test_layers_return_one_at_a_time_after_the_hold() -> None:
    class Passing(Frozen):
        def signals(self, sample: Sample) -> Iterable[Signal]:
            return [] if sample.step > 140 else super().signals(sample)

    box = Passing("bf16_layers").build(policy(hold=60))
    box.run(400)
    undone = [(step, command) for step, command in box.rank.applied if command.verb == "revert"]
    first, last = (command for _, command in undone)
    assert first.params == {"of": last.id, "layers": ["b"]}, "one layer of the action"
    assert last.params == {"layers": ["a"]}, "what is left of it"
    returned = [(step, command.params) for step, command in undone]
    assert returned[0][0] >= 110 + 60
    assert returned[1][0] >= returned[0][0] + 20
    (switch,) = box.actions("bf16_layers")
    assert (switch.status, switch.outcome) == ("reverted", "reverted")


def test_a_layer_whose_return_fails_is_held_again_and_twice_as_long() -> None:
    holder: list[Box] = []

    def script(sample: Sample) -> Iterable[Signal]:
        in_bf16 = holder[0].rank.in_force.get("bf16_layers", {}).get("layers", [])
        bad = tuple(layer for layer in ("a", "b") if layer not in in_bf16 and (layer == "b" or sample.step < 150))
        return [("scale_frozen", "bookkeeping", bad)] if bad and sample.step >= 100 else []

    box = Box(policy(hold=60), numbers=lambda step, rank: {}, script=script, layers=("a", "b", "c"))
    holder.append(box)
    box.run(600)
    switches = [record for record in box.actions("bf16_layers") if record.status in {"applied", "reverted"}]
    assert [record.params["layers"] for record in switches][:2] == [["a", "b"], ["b"]]
    assert "given back" in switches[1].reason
    first, second = (record.applied_step or 0 for record in switches[:2])
    undone = [step for step, command in box.rank.applied if command.verb == "revert" and command.id == switches[1].id]
    assert 110 + 60 <= second <= 110 + 60 + 10
    assert first < second
    assert undone[0] >= second + 120, "held for twice the 60 steps"


def test_hold_of_zero_is_not_the_same_as_no_hold() -> None:
    # case: SPK-25
    class Passing(Frozen):
        def signals(self, sample: Sample) -> Iterable[Signal]:
            return [] if sample.step > 115 else super().signals(sample)

    zero = Passing("bf16_layers").build(policy(hold=0))
    zero.run(250)
    assert ("revert", "bf16_layers") in [(verb, action) for _, verb, action in zero.commanded()]
    absent = Passing("bf16_layers").build(policy().replace(", hold_steps: 500", ""))
    absent.run(250)
    assert all(verb == "apply" for _, verb, _ in absent.commanded())


@pytest.mark.parametrize(("rollbacks", "expected"), [(0, False), (1, True)])
def test_no_rollbacks_means_never(rollbacks: int, expected: bool) -> None:
    # case: SPK-25
    box = Frozen(None).build(policy(rollbacks=rollbacks))
    box.run(250)
    assert ("apply", "rollback") in [(v, a) for _, v, a in box.commanded()] or not expected
    if not expected:
        assert all(action != "rollback" for _, _, action in box.commanded())
        assert "0 of 0 rollbacks" in box.actions("rollback")[0].reason


def test_spent_budget_is_recorded_and_nothing_is_done() -> None:
    box = Frozen(None).build(policy(actions=1))
    box.run(250)
    assert [action for _, _, action in box.commanded()] == ["repair_scale"]
    refused = box.actions("bf16_layers")[0]
    assert refused.status == "refused"
    assert "1 of 1 actions" in refused.reason


def test_observe_proposes_and_does_nothing() -> None:
    box = Frozen("repair_scale").build(policy(mode="observe"))
    box.run(200)
    assert box.commanded() == []
    (record,) = box.actions()
    assert (record.action, record.status, record.mode) == ("repair_scale", "proposed", "observe")


def test_rollback_goes_to_before_the_onset_and_not_to_the_newest() -> None:
    # case: SPK-02
    def script(sample: Sample) -> Iterable[Signal]:
        return [("divergence", "unknown", ())] if sample.step >= 1010 and sample.attempt == 0 else []

    box = Box(
        policy(), numbers=lambda step, rank: {}, script=script, onsets={"divergence": 960},
        checkpoint_steps=(900, 950, 1000),
    )  # fmt: skip
    box.run(1015)
    (record,) = box.actions("rollback")
    assert record.params["checkpoint_step"] == 950
    assert record.params["onset_step"] == 960
    assert record.params["margin_steps"] == 0
    assert "onset 960" in record.reason
    assert "step 1000 passed over" in record.reason
    labels = {update.checkpoint: update.label for update in box.rank.updates}
    assert labels["a0-s1000"] == "tainted"
    assert labels["a0-s950"] == "good"


def test_quiet_after_a_rollback_and_in_warm_up() -> None:
    box = Frozen(None).build(policy(), warmup_steps=30)
    box.run(180)
    assert box.pipeline is not None
    target = box.actions("rollback")[0].params["checkpoint_step"]
    quiet = box.pipeline.quiet_steps
    assert quiet[:30] == list(range(1, 31))
    assert quiet[30:] == list(range(target + 1, target + 21))
