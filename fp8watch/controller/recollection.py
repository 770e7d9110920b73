"""What a run's detectors know, kept in the store, so that a restarted agent goes on as if it had not been away.

In the first step, every `SAVE_EVERY` steps and with each finding, the detectors' state is written (`DetectorState`;
the newest replaces the one before). A new process loads it and is shown the frames that were stored since, which are
fewer than `SAVE_EVERY` a rank: baselines, windows, open incidents and their ids are then what they would have been.
Where the training process is a new one too, incidents are over and only baselines are taken over.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

from fp8watch.controller.detecting import Detecting
from fp8watch.controller.history import History
from fp8watch.controller.merge import Merger
from fp8watch.controller.stores.base import Store
from fp8watch.records import DetectorState, Finding, Hello, Layout, StepFrame, Stored

logger = logging.getLogger(__name__)
SAVE_EVERY = 64
"""Steps between two savings: at 1,680 tensors 2 MB and 40 ms, 0.6 ms a step."""


class Standing(Protocol):
    """What is kept of a `fp8watch.controller.run.RunPilot`, and laid over a fresh one."""

    run: str
    attempt: int
    step: int
    seen: int
    saves_detectors: bool
    _quiet_until_seen: int
    _prefix: str
    _evidence: dict[str, Finding]
    _pipeline: Detecting
    _merger: Merger
    _history: History


def stored_since(store: Store, run: str) -> list[Stored]:
    """The newest state of a run's detectors with the layouts and frames that it has not seen; empty without a state."""
    state = next(iter(store.read(run, DetectorState)), None)
    if state is None:
        return []
    layouts = [layout for layout in store.read(run, Layout) if layout.attempt == state.attempt]
    frames = [
        frame for frame in store.read(run, StepFrame, first_step=state.step + 1) if frame.attempt == state.attempt
    ]
    return [state, *layouts, *frames]


def state_if_due(pilot: Standing, *, has_news: bool) -> list[Stored]:
    """A state to be stored, when it is time or something was found."""
    dump: Any = getattr(pilot._pipeline, "dump", None)
    if not pilot.saves_detectors or dump is None or not (has_news or pilot.seen % SAVE_EVERY == 1):
        return []
    try:
        data = dump()
    except Exception:
        logger.exception("the detectors' state of run %s could not be taken", pilot.run)
        return []
    return [
        DetectorState(
            run=pilot.run, attempt=pilot.attempt, step=pilot.step, seen=pilot.seen,
            quiet_until_seen=pilot._quiet_until_seen, prefix=pilot._prefix, data=data,
        )
    ]  # fmt: skip


def recall(pilot: Standing, restored: Iterable[Stored], hello: Hello, *, is_same_process: bool) -> None:
    """Lay what the store has over a fresh pilot; without a state, or with one of another version, it stays fresh."""
    restored = list(restored)
    state = next((record for record in restored if isinstance(record, DetectorState)), None)
    load: Any = getattr(pilot._pipeline, "load", None)
    if state is None or load is None or (hello.step == 0 and not is_same_process):
        return
    try:
        load(state.data)
    except Exception as error:  # another version's, or damaged: detectors that know nothing are better than none
        logger.warning("run %s: the detectors begin anew: %s: %s", hello.run, type(error).__name__, error)
        return
    if not is_same_process:
        pilot._pipeline.reset("resume", step=hello.step)
        return
    pilot.step, pilot.seen, pilot._prefix = state.step, state.seen, state.prefix
    pilot._quiet_until_seen = state.quiet_until_seen
    _relive(pilot, restored, hello)
    known = {record.incident: record for record in restored if isinstance(record, Finding)}
    names = [state.prefix + incident.id for incident in pilot._pipeline.open_incidents()]
    pilot._evidence = {name: known[name] for name in names if name in known}


def _relive(pilot: Standing, restored: list[Stored], hello: Hello) -> None:
    """Show merger, history and detectors the frames that came after the state."""
    pilot._merger.restart(pilot.step)
    for record in restored:
        if isinstance(record, Layout):
            pilot._merger.layout(record)
    frames = [record for record in restored if isinstance(record, StepFrame)]
    for frame in sorted(frames, key=lambda frame: (frame.step, frame.rank)):
        for sample in pilot._merger.frame(frame):
            pilot.seen, pilot.step = pilot.seen + 1, sample.step
            pilot._history.add(sample)
            is_warm = hello.warmup_steps is not None and sample.step <= hello.warmup_steps
            is_quiet = is_warm or pilot.seen <= pilot._quiet_until_seen
            # What it finds again is in the store already, under the same id.
            pilot._pipeline.observe(replace(sample, is_quiet=is_quiet))
