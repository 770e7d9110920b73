"""A restarted agent continues with what it knew: the same findings, with the same ids, as without a restart."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from fp8watch import columns
from fp8watch.controller import detector_memory
from fp8watch.controller.service import RunController
from fp8watch.controller.stores.base import Store
from fp8watch.controller.stores.memory import MemoryStore
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.records import DetectorState, Finding, Hello, Layout, StepFrame, TensorColumn

TENSORS = [
    TensorColumn(module=f"blocks.{i}.down", tensor=tensor, block=str(i), fp8_format="e4m3", history_len=16)  # type: ignore[arg-type]
    for i in range(2)
    for tensor in ("input", "weight")
]
STEPS = 180


def hello(step: int, pid: int = 1, attempt: int = 0) -> Hello:
    return Hello(
        wire_version=1, run="r", attempt=attempt, rank=0, local_rank=0, world_size=1, pid=pid, host="h", time_unix=1.0,
        step=step,
    )  # fmt: skip


def frames() -> list[StepFrame]:
    """A spike at 90 that is still open at 100, scales that freeze at 140, a NaN at 170."""
    rng = np.random.default_rng(0)
    window: list[np.ndarray] = []
    scale = np.ones(4, np.float32)
    made = []
    for step in range(1, STEPS + 1):
        amax = np.exp(rng.normal(0, 0.2, 4)).astype(np.float32)
        loss = 2.0 * (1 + 0.01 * rng.standard_normal()) * (2.0 if 90 <= step < 104 else 1.0)
        shown = scale * np.float32(64.0 if step >= 140 else 1.0)
        made.append(
            StepFrame(
                run="r", attempt=0, rank=0, step=step, layout_id=0, time_unix=float(step),
                scalars={"loss": math.nan if step == 170 else loss, "grad_norm": float(np.exp(rng.normal(0, 0.1)))},
                columns={"amax": columns.pack(amax, "f4"), "scale": columns.pack(shown, "f4")},
            )
        )  # fmt: skip
        window = [*window, amax][-16:]
        scale = (448.0 / np.max(window, axis=0)).astype(np.float32)
    return made


def layout() -> Layout:
    return Layout(run="r", attempt=0, rank=0, layout_id=0, columns=TENSORS, expected_modules=2, observed_modules=2)


def run(store: Store, restarts: tuple[int, ...] = ()) -> list[Finding]:
    controller = None
    for frame in frames():
        if controller is None or frame.step in restarts:
            controller = RunController(store, clock=lambda: 1.0)
            controller.receive(hello(frame.step - 1))
            controller.receive(layout())
        controller.receive(frame)
    return list(store.read("r", Finding))


@pytest.mark.parametrize("restarts", [(95,), (129,), (145,), (60, 100, 171)])
def test_restarts_change_no_finding(tmp_path: Path, restarts: tuple[int, ...]) -> None:
    whole = run(MemoryStore())
    assert {(f.detector, f.severity) for f in whole} >= {
        ("loss_spike", "act"), ("scale_frozen", "act"), ("nonfinite", "act"),
    }  # fmt: skip
    store = SqliteStore(tmp_path / "store.db")
    assert run(store, restarts) == whole
    assert len(list(store.read("r", DetectorState))) == 1
    store.close()


def test_a_restarted_controller_stands_where_one_that_stayed_does() -> None:
    """At step 96 with an open incident, whose evidence decisions are founded on, and a state from step 65 on."""
    stayed, store = MemoryStore(), MemoryStore()
    controllers = [RunController(each, clock=lambda: 1.0) for each in (stayed, store)]
    for controller in controllers:
        controller.receive(hello(0))
        controller.receive(layout())
        for frame in frames()[:96]:
            controller.receive(frame)
    again = RunController(store, clock=lambda: 1.0)
    again.receive(hello(96))
    kept, restarted = (controller._runs["r"].pilot for controller in (controllers[0], again))
    assert kept.progress().evidence
    assert kept.progress().seen == 96
    assert restarted.progress() == kept.progress()
    assert list(restarted.open_incidents()) == list(kept.open_incidents())


def test_without_frames_but_since_the_last_state_it_is_the_same() -> None:
    assert run(MemoryStore(keep_frames=False), (95, 145)) == run(MemoryStore())


def test_without_the_memory_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(MemoryStore())
    monkeypatch.setattr(detector_memory, "SAVE_EVERY", 10**9)
    monkeypatch.setattr("fp8watch.controller.run.state_if_due", lambda progress, pipeline, has_news: [])
    assert run(MemoryStore(), (95,)) != whole


def test_a_state_that_cannot_be_read_costs_the_past_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    first = RunController(store, clock=lambda: 1.0)
    first.receive(hello(0))
    store.append(
        "r", [DetectorState(run="r", attempt=0, step=5, seen=5, quiet_until_seen=0, prefix="", data=b"\x00 no state")]
    )
    second = RunController(store, clock=lambda: 1.0)
    second.receive(hello(5))
    assert any("start without history" in record.getMessage() for record in caplog.records)
    for step in range(6, 12):
        second.receive(
            StepFrame(
                run="r", attempt=0, rank=0, step=step, layout_id=0, time_unix=1.0,
                scalars={"loss": math.nan if step == 11 else 2.0},
            )
        )  # fmt: skip
    assert [f.detector for f in store.read("r", Finding)] == ["nonfinite"]


def test_a_new_training_process_takes_over_baselines_and_no_incident() -> None:
    store = MemoryStore()
    controller = RunController(store, clock=lambda: 1.0)
    controller.receive(hello(0))
    controller.receive(layout())
    for frame in frames()[:96]:
        controller.receive(frame)
    again = RunController(store, clock=lambda: 1.0)
    again.receive(hello(80, pid=2, attempt=1))
    before = len(list(store.read("r", Finding)))
    for step in range(81, 120):
        loss = 4.0 if step >= 110 else 2.0
        again.receive(
            StepFrame(run="r", attempt=1, rank=0, step=step, layout_id=0, time_unix=1.0, scalars={"loss": loss})
        )
    found = list(store.read("r", Finding))[before:]
    # Twenty quiet steps, and then the old baseline counts: a fresh one would need 24 points of its own.
    assert [(f.detector, f.step, f.severity) for f in found if f.severity == "act"] == [("loss_spike", 112, "act")]
