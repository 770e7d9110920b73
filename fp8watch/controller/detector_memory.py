"""What a run's detectors know, kept in the store, so that a restarted agent goes on as if it had not been away.

In the first step, every `SAVE_EVERY` steps and with each finding, the detectors' state is written (`DetectorState`;
the newest replaces the one before). A new process loads it and is shown the frames that were stored since, which are
fewer than `SAVE_EVERY` a rank: baselines, windows, open incidents and their ids are then what they would have been.
Where the training process is a new one too, incidents are over and only baselines are taken over.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fp8watch.controller.detecting import DetectorPipeline
from fp8watch.controller.history import History
from fp8watch.controller.merge import Merger
from fp8watch.controller.roster import is_warm_up
from fp8watch.controller.stores.base import Store
from fp8watch.detect.base import Sample
from fp8watch.records import DetectorState, Finding, Hello, Layout, StepFrame, Stored

logger = logging.getLogger(__name__)
SAVE_EVERY = 64
"""Steps between two savings: at 1,680 tensors 2 MB and 40 ms, 0.6 ms a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotProgress:
    """How far a run's pilot has come: kept with what its detectors know, and given to a fresh one."""

    run: str
    attempt: int
    step: int
    seen: int
    """Samples that the detectors were shown."""
    quiet_until_seen: int
    """Up to here baseline rules keep still."""
    prefix: str
    """What ids of findings and incidents begin with."""
    evidence: Mapping[str, Finding]
    """Incident -> its newest finding."""


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


def state_if_due(progress: PilotProgress, pipeline: DetectorPipeline, *, has_news: bool) -> list[Stored]:
    """A state to be stored, when it is time or something was found."""
    dump: Any = getattr(pipeline, "dump", None)
    if dump is None or not (has_news or progress.seen % SAVE_EVERY == 1):
        return []
    try:
        data = dump()
    except Exception:
        logger.exception("the detectors' state of run %s could not be taken", progress.run)
        return []
    return [
        DetectorState(
            run=progress.run, attempt=progress.attempt, step=progress.step, seen=progress.seen,
            quiet_until_seen=progress.quiet_until_seen, prefix=progress.prefix, data=data,
        )
    ]  # fmt: skip


def restore_detectors(
    progress: PilotProgress,
    restored: Iterable[Stored],
    hello: Hello,
    *,
    is_same_process: bool,
    pipeline: DetectorPipeline,
    merger: Merger,
    history: History,
) -> PilotProgress:
    """Show a fresh pilot's detectors, merger and history what the store has; how far the pilot has come with it.

    Without a state, or with one of another version, nothing is shown and `progress`, the fresh one's, holds.
    """
    restored = list(restored)
    state = next((record for record in restored if isinstance(record, DetectorState)), None)
    load: Any = getattr(pipeline, "load", None)
    if state is None or load is None or (hello.step == 0 and not is_same_process):
        return progress
    try:
        load(state.data)
    except Exception as error:  # another version's, or damaged: detectors that know nothing are better than none
        logger.warning(
            "run %s: the detectors start without history, their saved state cannot be used: %s: %s",
            hello.run,
            type(error).__name__,
            error,
        )
        return progress
    if not is_same_process:
        pipeline.reset("resume", step=hello.step)
        return progress
    step, seen = state.step, state.seen
    merger.restart(step)
    for sample in _since(restored, merger):
        step, seen = sample.step, seen + 1
        history.add(sample)
        is_quiet = is_warm_up({hello.rank: hello}, step) or seen <= state.quiet_until_seen
        # What it finds again is in the store already, under the same id.
        pipeline.observe(replace(sample, is_quiet=is_quiet))
    known = {record.incident: record for record in restored if isinstance(record, Finding)}
    names = [state.prefix + incident.id for incident in pipeline.open_incidents()]
    return replace(
        progress, step=step, seen=seen, quiet_until_seen=state.quiet_until_seen, prefix=state.prefix,
        evidence={name: known[name] for name in names if name in known},
    )  # fmt: skip


def _since(restored: list[Stored], merger: Merger) -> Iterator[Sample]:
    """The steps that came after the state."""
    for record in restored:
        if isinstance(record, Layout):
            merger.layout(record)
    frames = [record for record in restored if isinstance(record, StepFrame)]
    for frame in sorted(frames, key=lambda frame: (frame.step, frame.rank)):
        yield from merger.frame(frame)
