"""What an action changes is all or nothing, at whatever line it fails, and taken back exactly while no step was made.

Ranks compare their outcomes: one that has changed a part, or whose undoing leaves a trace, trains with another
precision, scale or learning rate than the others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tiny_run import TinyRun

from fp8watch import rng
from fp8watch.actions.base import Applied
from fp8watch.actions.undo import Undo, all_or_nothing, take_back, whole
from fp8watch.checkpoints.checksum import sum_nested
from fp8watch.errors import ActionError, CheckpointError, PartlyChanged

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lengthen_warmup": ("lengthen_warmup", {"stretch": 3.0}),
    "rewarm": ("rewarm", {"steps": 50, "start_factor": 0.2}),
    "hold_lr": ("hold_lr", {"factor": 0.5, "steps": 40, "restore_steps": 10}),
    "tighten_clip": ("tighten_clip", {"factor": 0.5}),
    "tighten_clip of tensors": ("tighten_clip", {"per_tensor": 2.0}),
    "skip_update": ("skip_update", {"max_consecutive": 7}),
    "adjust_loss_scale": ("adjust_loss_scale", {"factor": 0.5}),
    "raise_margin": ("raise_margin", {"bits": 2.0}),
    "repair_scale": ("repair_scale", {}),
    "bf16_layers": ("bf16_layers", {"layers": ["0", "3"]}),
    "bf16_all": ("bf16_all", {}),
    "checkpoint_cadence": ("checkpoint_cadence", {"every": 3}),
    "recheck": ("recheck", {}),
    "halt": ("halt", {"reason": "test"}),
}
BEFORE = [
    ("hold_lr", {"factor": 0.9}), ("rewarm", {"steps": 90, "start_factor": 0.5}), ("bf16_layers", {"layers": ["3"]}),
    ("tighten_clip", {"max_norm": 0.9}), ("skip_update", {"max_consecutive": 5}), ("checkpoint_cadence", {"every": 9}),
    ("raise_margin", {"bits": 1.0}), ("hold_lr", {"factor": 0.8}),
]  # fmt: skip
TRACED = ("fp8watch/actions/", "fp8watch/emulation/", "fp8watch/capture/emulated_controls.py")


def made(folder: Path, *, is_busy: bool) -> TinyRun:
    """A run in mid-training. `is_busy`: with actions in force already."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    run = TinyRun(folder, fp8=True, every=100, peak_at=60)
    run.run(5)
    run.context.parts.scaler = scaler
    run.context.forward = lambda: run.model(torch.ones(4, 16)).pow(2).mean()
    for name, params in BEFORE if is_busy else []:
        run.apply(name, **params)
    for layer in (run.model[0], run.model[3]):  # a scale that a repair changes
        layer.scaling_forward.scale.mul_(4.0)
    return run


def knobs(run: TinyRun) -> dict[str, Any]:
    """Everything that an action may change in the process."""
    context, layers = run.context, [module for module in run.model if hasattr(module, "scaling_forward")]
    assert context.controls is not None
    return {
        "rules": [(key, repr(rule)) for key, rule in context.lr.rules.items()],
        "clip": (context.clip.limit, context.clip.tensors, sorted(run.actions["tighten_clip"]._limits.values)),
        "skip": (context.skip.reasons, context.skip.max_in_a_row, list(run.actions["skip_update"]._limits.values)),
        "scaler": run.context.parts.scaler.get_scale(),
        "precision": ([layer.is_high_precision for layer in layers], dict(context.high_precision)),
        "margin": context.controls.margin(),
        "scales": sum_nested(context.controls.state_dict()),
        "cadence": (run.manager.every, list(run.actions["checkpoint_cadence"]._cadences.values)),
        "halt": context.halt_reason,
        "gradients": [None if p.grad is None else p.grad.clone().tolist() for p in run.model.parameters()],
        "random": sum_nested(rng.snapshot()),
    }


@contextmanager
def failing_at(line: int, error: type[BaseException]) -> Iterator[list[int]]:
    """Raise once, at the so-many-th line of our code; yields a list with how many were run."""
    lines = [0]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not any(part in name for part in TRACED) or name.endswith("undo.py"):
            return None
        if event == "line":
            lines[0] += 1
            if lines[0] == line:
                raise error("odd")
        return trace

    own = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(own)


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_changed_at_whatever_line_an_action_fails(tmp_path: Path, case: str, is_busy: bool) -> None:
    name, params = CASES[case]
    run = made(tmp_path, is_busy=is_busy)
    before = knobs(run)
    with failing_at(0, RuntimeError) as lines:
        take_back(run.actions[name], run.actions[name].apply(run.global_step, dict(params)))
    assert knobs(run) == before, "taken back exactly"
    for line in range(1, lines[0] + 1, 1 if lines[0] < 200 else 7):
        error: type[BaseException] = KeyboardInterrupt if line % 5 == 0 else RuntimeError
        applied = None
        with failing_at(line, error):
            try:
                applied = run.actions[name].apply(run.global_step, dict(params))
            except (ActionError, KeyboardInterrupt):
                pass
            except PartlyChanged:  # what failed is a step of recheck's own restoring: it says so
                assert name == "recheck"
                break
        if applied is not None:  # the line was in what takes it back
            take_back(run.actions[name], applied)
        assert knobs(run) == before, f"line {line}"


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("recheck", "checkpoint_cadence")])
def test_the_knobs_show_what_an_action_changes(tmp_path: Path, case: str) -> None:
    name, params = CASES[case]
    run = made(tmp_path, is_busy=False)
    before = knobs(run)
    run.apply(name, **params)
    assert knobs(run) != before


def test_a_hold_that_is_taken_back_is_not_released_over_its_steps(tmp_path: Path) -> None:
    run = made(tmp_path, is_busy=False)
    applied = run.apply("hold_lr", factor=0.5, restore_steps=10)
    take_back(run.actions["hold_lr"], applied)
    assert run.context.lr.rules == {}


def test_a_rewarm_that_is_taken_back_leaves_the_one_that_it_had_replaced(tmp_path: Path) -> None:
    run = made(tmp_path, is_busy=False)
    run.apply("rewarm", steps=90, start_factor=0.5)
    run.apply("hold_lr", factor=0.8)
    rules = list(run.context.lr.rules.items())
    take_back(run.actions["rewarm"], run.apply("rewarm", steps=50, start_factor=0.1))
    assert list(run.context.lr.rules.items()) == rules


@pytest.mark.parametrize("name", ["bf16_all", "raise_margin"])
def test_a_return_that_fails_half_way_is_none(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(tmp_path, is_busy=False)
    applied = run.apply(name)
    run.step()
    before = knobs(run)
    controls = run.context.controls
    verb = "set_margin" if name == "raise_margin" else "set_high_precision"
    own, failed = getattr(controls, verb), []

    def fails_once(*args: Any, **options: Any) -> None:
        own(*args, **options)
        if not failed:
            failed.append(1)
            raise RuntimeError("out of memory")

    monkeypatch.setattr(controls, verb, fails_once)
    with pytest.raises(ActionError, match="out of memory"):
        run.actions[name].revert(applied)
    assert knobs(run) == before


def test_a_buffer_that_the_forward_makes_is_no_reason_to_restore_nothing(tmp_path: Path) -> None:
    run = made(tmp_path, is_busy=False)

    def forward() -> torch.Tensor:
        run.model.register_buffer("cache", torch.rand(3))
        return run.model(torch.ones(4, 16)).sum()

    run.context.forward = forward
    before = knobs(run)
    run.apply("recheck")
    assert knobs(run) == before


class Tower:
    """An action of three parts; what is in `stuck` cannot be taken back."""

    name = "tower"

    def __init__(self, error: BaseException | None = None, stuck: tuple[str, ...] = ()) -> None:
        self.parts: list[str] = []
        self.error, self.stuck = error, stuck

    @all_or_nothing
    def apply(self, step: int, params: dict[str, Any], undo: Undo) -> Applied:
        for part in ("a", "b", "c"):
            undo.add(part, lambda part=part: self.remove(part))
            self.parts.append(part)
        if self.error is not None:
            raise self.error
        return Applied(step=step, params=params)

    def remove(self, part: str) -> None:
        if part in self.stuck:
            raise OSError("jammed")
        assert self.parts[-1] == part or self.stuck, "last one first"
        self.parts.remove(part)


@pytest.mark.parametrize("error", [ActionError("no"), CheckpointError("no"), SystemExit(3)])
def test_foreseen_errors_and_interruptions_are_passed_on_as_they_are(error: BaseException) -> None:
    tower = Tower(error)
    with pytest.raises(type(error)) as caught:
        tower.apply(1, {})
    assert caught.value is error
    assert tower.parts == []


def test_an_unforeseen_error_names_itself_and_nothing_is_left() -> None:
    tower = Tower(KeyError("layer"))
    with pytest.raises(ActionError, match="KeyError: 'layer'"):
        tower.apply(1, {})
    assert tower.parts == []


def test_what_cannot_be_taken_back_is_named_and_the_rest_is_taken_back() -> None:
    tower = Tower(RuntimeError("odd"), stuck=("b",))
    with pytest.raises(PartlyChanged, match=r"^RuntimeError: odd; still changed: b \(OSError: jammed\)$"):
        tower.apply(1, {})
    assert tower.parts == ["b"]
    later = Tower(stuck=("a", "c"))
    applied = later.apply(1, {})
    with pytest.raises(PartlyChanged, match=r"still changed: c .*, a "):
        take_back(later, applied)  # type: ignore[arg-type]
    assert later.parts == ["a", "c"]


class Impatient(Tower):
    """Ctrl-C is pressed again while it is taken back: before, or after, what the step does."""

    def __init__(self, error: BaseException | None, when: str, presses: int = 1) -> None:
        super().__init__(error)
        self.when, self.presses = when, presses

    def remove(self, part: str) -> None:
        is_pressed = part == "b" and self.presses > 0
        self.presses -= is_pressed
        if is_pressed and self.when == "before":
            raise KeyboardInterrupt
        if part in self.parts:
            self.parts.remove(part)
        if is_pressed:
            raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("odd"), None])
def test_an_interruption_of_the_undoing_leaves_nothing_half_undone(error: BaseException | None, when: str) -> None:
    tower = Impatient(error, when)
    with pytest.raises(KeyboardInterrupt):
        take_back(tower, tower.apply(1, {}))  # type: ignore[arg-type]
    assert tower.parts == []


def test_who_insists_is_told_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    tower = Impatient(KeyboardInterrupt(), "before", presses=2)
    with pytest.raises(KeyboardInterrupt):
        tower.apply(1, {})
    assert tower.parts == ["b"]
    assert "still changed: b (KeyboardInterrupt" in caplog.text


def test_a_block_that_ends_well_takes_nothing_back() -> None:
    found: list[str] = []
    with whole("x") as undo:
        undo.add("y", lambda: found.append("undone"))
    assert found == []
