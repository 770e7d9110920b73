"""The shipped automatic policy against scripted runs: the right kind of action for each cause, and none for some."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources

import pytest
from controller_sim import Box, Rank, Signal

from fp8watch.detect.base import Sample
from fp8watch.records import TraceEntry

AUTO = (resources.files("fp8watch.policy") / "policies" / "auto.yaml").read_text("utf-8")
LAYERS = ("a", "b", "c", "d")


def scene(signal: Signal, *, at: int = 200, for_steps: int = 12, **options: object) -> Box:
    """A run in which one detector speaks from a step on, until a rollback or for so many steps."""

    def script(sample: Sample) -> Iterable[Signal]:
        return [signal] if at <= sample.step < at + for_steps and sample.attempt == 0 else []

    return Box(
        AUTO, numbers=lambda step, rank: {}, script=script, layers=LAYERS, checkpoint_steps=range(50, 400, 50),
        warmup_steps=40, **options,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("signal", "first"),
    [
        (("scale_frozen", "bookkeeping", LAYERS), "repair_scale"),
        (("saturation", "precision", ("a",)), "repair_scale"),
        (("underflow", "bookkeeping", ("a",)), "repair_scale"),
        (("loss_spike", "precision", ("a",)), "bf16_layers"),
        (("divergence", "precision", ()), "bf16_all"),
        (("loss_spike", "hardware", ()), "rollback"),
        (("amax_jump", "hardware", ("a",)), "rollback"),
        (("update_rms", "optimisation", ()), "hold_lr"),
        (("divergence", "optimisation", ()), "hold_lr"),
        (("grad_spike", "optimisation", ()), "tighten_clip"),
        (("loss_spike", "data", ()), None),
        (("divergence", "data", ()), None),
        (("loss_spike", "unknown", ()), None),
        (("amax_jump", "unknown", ("a",)), None),
        (("blind", "unknown", ()), None),
    ],
)
def test_each_cause_has_its_own_kind_of_answer(signal: Signal, first: str | None) -> None:
    box = scene(signal)
    box.run(230)
    commanded = [action for _, verb, action in box.commanded() if verb == "apply"]
    assert (commanded[0] if commanded else None) == first


def test_precision_is_never_touched_for_a_faulty_device() -> None:
    box = scene(("amax_jump", "hardware", ("a",)), for_steps=200)
    box.run(300)
    assert {action for _, _, action in box.commanded()} == {"rollback"}
    assert box.actions("rollback")[0].params["checkpoint_step"] == 150


@pytest.mark.parametrize(("at", "first"), [(52, "rollback"), (57, "rollback"), (40, "halt")])
def test_a_faulty_device_early_on_is_no_reason_to_stop_while_there_is_something_to_go_back_to(
    at: int, first: str
) -> None:
    """The one checkpoint was saved a few steps before the onset: too few for it ever to be called good."""
    box = scene(("amax_jump", "hardware", ("a",)), at=at)
    box.run(at + 5)
    assert [action for _, _, action in box.commanded()] == [first]
    if first == "rollback":
        (record,) = box.actions("rollback")
        assert record.params["checkpoint_step"] == 50
        assert "candidate (none is known to be good)" in record.reason


@pytest.mark.parametrize(("at", "first"), [(20, "rewarm"), (60, "rewarm"), (200, None)])
def test_trouble_near_the_warm_up_lowers_the_rate_and_lets_it_rise_again(at: int, first: str | None) -> None:
    box = scene(("loss_spike", "unknown", ()), at=at)
    box.run(at + 30)
    commanded = [action for _, verb, action in box.commanded() if verb == "apply"]
    assert (commanded[0] if commanded else None) == first


def test_a_healthy_run_is_left_alone() -> None:
    box = Box(AUTO, numbers=lambda step, rank: {}, checkpoint_steps=range(50, 400, 50))
    box.run(400)
    assert box.commanded() == []
    assert box.actions() == []


def test_clipping_covers_the_bursts_it_is_there_for() -> None:
    def script(sample: Sample) -> Iterable[Signal]:
        return [("grad_spike", "optimisation", ())] if sample.step >= 100 and sample.step % 15 == 0 else []

    box = Box(
        AUTO, numbers=lambda step, rank: {"grad_norm": 300.0 if step % 15 == 0 else 0.4}, script=script,
        checkpoint_steps=range(50, 400, 50),
    )  # fmt: skip
    box.run(400)
    assert [action for _, _, action in box.commanded()] == ["tighten_clip"]
    (record,) = box.actions()
    assert record.outcome == "helped"
    assert record.params["max_norm"] == pytest.approx(0.6)


class JumpingLr:
    """A scheduler that jumps by 30 until step `end`, at every replay again; the loss suffers unless the level is held.

    `is_held(rank)`: whether the remedy holds the level, so that a no-op can be put in its place.
    """

    def __init__(self, policy: str = AUTO, *, end: int = 240, is_no_op: bool = False) -> None:
        self.end = end
        self.is_no_op = is_no_op
        self.damage = 0.0
        self.last_attempt = 0
        self.box = Box(policy, numbers=self.numbers, script=self.script, checkpoint_steps=range(50, 600, 50))

    def is_jumped(self, step: int) -> bool:
        return 200 <= step < self.end

    def is_held(self, rank: Rank) -> bool:
        return "hold_lr" in rank.in_force and not self.is_no_op

    def numbers(self, step: int, rank: Rank) -> dict[str, float]:
        if rank.attempt != self.last_attempt:
            self.last_attempt, self.damage = rank.attempt, 0.0
        scheduled = 3e-2 if self.is_jumped(step) else 1e-3
        level = rank.in_force.get("hold_lr", {}).get("to_lr", 1.0) if self.is_held(rank) else 1.0
        effective = min(scheduled, level)
        self.damage = self.damage * 0.99 + (0.2 if effective > 1e-2 else 0.0)
        return {"loss": 2.0 + self.damage, "learning_rate": effective, "lr_factor": effective / scheduled}

    def script(self, sample: Sample) -> Iterable[Signal]:
        if sample.scalars["learning_rate"] > 1e-2:
            yield ("update_rms", "optimisation", ())


def test_a_jumped_learning_rate_is_held_and_what_it_spoilt_is_replayed() -> None:
    scene = JumpingLr()
    scene.box.run(400)
    assert [(verb, action) for _, verb, action in scene.box.commanded()][:2] == [
        ("apply", "hold_lr"), ("apply", "rollback"),
    ]  # fmt: skip
    hold, rollback = scene.box.actions()
    assert hold.params == {"to_lr": pytest.approx(1e-3)}
    assert hold.outcome == "helped"
    assert "above its level before onset 200" in rollback.reason
    assert "kept in force: hold_lr" in rollback.reason
    assert rollback.params["checkpoint_step"] == 150
    assert scene.damage == 0.0, "the replay did not repeat it"
    assert rollback.outcome == "helped"


@pytest.mark.parametrize("name", ["auto", "fp8-pretraining"])
def test_a_learning_rate_that_stays_wrong_stays_held_and_one_that_is_back_is_let_go(name: str) -> None:
    text = (resources.files("fp8watch.policy") / "policies" / f"{name}.yaml").read_text("utf-8")
    for end, returns in ((10_000, 0), (700, 1)):
        scene = JumpingLr(text, end=end)
        scene.box.run(1200)
        commanded = [(verb, action) for _, verb, action in scene.box.commanded()]
        assert commanded == [("apply", "hold_lr"), ("apply", "rollback")] + [("revert", "hold_lr")] * returns
        returned = [step for step, verb, _ in scene.box.commanded() if verb == "revert"]
        assert all(step == pytest.approx(end, abs=3) for step in returned), "as soon as the schedule is back"
        assert scene.damage == 0.0, "no update was made at the wrong rate after the replay"
    notes = [entry for entry in scene.box.store.read("r", TraceEntry) if entry.event == "held_back"]
    assert "the schedule asks for 0.03: held at 0.001" in notes[-1].reason
    assert notes[-1].incident, "told with the incident it belongs to"


def test_a_hold_that_does_nothing_is_not_called_a_help() -> None:
    scene = JumpingLr(is_no_op=True)
    scene.box.run(230)
    assert scene.box.actions("hold_lr")[0].outcome == "no_effect"
