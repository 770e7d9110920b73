"""Record the corpus of emulated FP8 runs under tests/data/recorded: every scenario of the demo, and look-alikes.

    python bench/record_corpus.py [--seed N ...] [--scenario NAME ...] [--raw FOLDER] [--pack-only]

Every run is a real training of the demo's GPT, watched in observe mode so that the fault runs its course. Runs of a
seed are the same training up to their fault: it is trained once and forked where a fault enters. Raw (exact) recordings
go to FOLDER, one file per run, and are not made again if they exist; then those of each seed are rounded
(`record_rounding.py`) and packed into one file. Seeds in `HELD_OUT` have other fault steps and layers than the
defaults: nobody looked at them while detectors and attribution were built. Takes about ten minutes per seed on one
core.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import record_faults
import torch
from record_rounding import rounded
from torch.utils.data import Dataset

import fp8watch
from fp8watch.demo.config import TrainingConfig
from fp8watch.demo.data import Item
from fp8watch.demo.model import Shape, layer_names
from fp8watch.demo.scenarios.base import Fault, Setting
from fp8watch.demo.scenarios.catalogue import SCENARIOS
from fp8watch.demo.schedule import Schedule
from fp8watch.demo.trainer import Training, build, train
from fp8watch.detect.pipeline import Pipeline
from fp8watch.records import Layout, StepFrame
from fp8watch.replay import frames_file
from fp8watch.settings import Settings
from fp8watch.training import assemble
from fp8watch.transport.pending import as_message

OUT = Path(__file__).parents[1] / "tests" / "data" / "recorded"
SEEDS = (0, 1, 3, 4, 5, 6, 7)
HELD_OUT = frozenset({3, 4, 6, 7})
"""Seeds with other fault steps and layers."""
LATER = {seed: frozenset({"creeping-rate", "moments-lost", "grad-bursts", "healthy-grad-bursts"}) for seed in (6, 7)}
"""Recorded when the rules for these faults were finished, because the other held-out runs had been seen by then."""
FORK_AHEAD = 3
"""Steps before the fault at which a training is forked, so that data and rate of the fault step are not drawn yet."""
AFTER = 80
"""Steps recorded from the fault on; ..."""
SLOW, SLOW_AFTER = frozenset({"creeping-rate", "outlier-growth", "grad-bursts", "short-warmup"}), 120
"""... more of them for slow faults ..."""
TO_THE_END = frozenset({"gradient-underflow"})
"""... and in these to the run's end: the loss moves late."""
CAUSES = {
    "frozen-scale": "bookkeeping", "gradient-underflow": "bookkeeping", "nan-loss": "precision",
    "lr-too-high": "optimisation", "short-warmup": "optimisation", "grad-bursts": "optimisation",
    "bad-batch": "data", "bit-flip": "hardware", "outlier-channel": "outlier",
}  # fmt: skip
"""The true causes of the demo's scenarios; `outlier`: heals by itself, so nothing should be found to act on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One run to record."""

    scenario: str
    seed: int
    cause: str | None
    """None: healthy."""
    config: TrainingConfig
    fault_step: int | None = None
    layer: str = ""
    last_step: int = 400
    trunk: str = "healthy"
    """Name of the run that it is forked from; its own name for a trunk."""

    @property
    def name(self) -> str:
        return f"{self.scenario}-{self.seed}"


def wanted(seed: int) -> list[Wanted]:
    """All runs of a seed, trunks first."""
    config = TrainingConfig(seed=seed)
    runs = [Wanted(scenario="healthy", seed=seed, cause=None, config=config)]
    for index, (name, chosen) in enumerate(SCENARIOS.items()):
        both = msgspec.structs.replace(config, **chosen.both)
        trunk = f"healthy-{name}" if chosen.both else "healthy"
        if chosen.both:
            runs.append(Wanted(scenario=trunk, seed=seed, cause=None, config=both, last_step=180, trunk=trunk))
        if name == "healthy":
            continue
        faulty = msgspec.structs.replace(both, **chosen.faulty)
        default = round(config.steps * chosen.fault_share) if chosen.takes_fault_step else faulty.warmup_steps
        step = _fault_step(default, index, seed) if chosen.takes_fault_step else default
        runs.append(
            Wanted(
                scenario=name, seed=seed, cause=CAUSES[name], config=faulty, fault_step=step,
                layer=_layer(chosen.layer or "", index, seed), trunk=name if chosen.faulty else trunk,
                last_step=_last_step(name, step, config.steps),
            )
        )  # fmt: skip
    for index, (name, (cause, layer, _)) in enumerate(record_faults.FAULTS.items(), start=len(SCENARIOS)):
        step = _fault_step(config.steps // 2, index, seed)
        runs.append(
            Wanted(
                scenario=name, seed=seed, cause=cause, config=config, fault_step=step,
                layer=_layer(layer, index, seed), last_step=_last_step(name, step, config.steps),
            )
        )  # fmt: skip
    return runs


def _fault_step(default: int, index: int, seed: int) -> int:
    if seed not in HELD_OUT:
        return default
    return default - default // 4 + (23 * index + 41 * seed) % (default // 2)


def _last_step(scenario: str, fault_step: int, steps: int) -> int:
    if scenario in TO_THE_END:
        return steps
    return min(steps, fault_step + (SLOW_AFTER if scenario in SLOW else AFTER) - 1)


def _layer(default: str, index: int, seed: int) -> str:
    if seed not in HELD_OUT or not default:
        return default
    names = layer_names(Shape())
    fitting = [name for name in names if name.endswith(default.rsplit(".", 1)[1])]
    return [name for name in fitting if name != default][(index + seed) % (len(fitting) - 1)]


class Tape:
    """Replaces the transport and keeps what a rank would send."""

    def __init__(self, *, run: str, settings: Settings, local_rank: int = 0, **more: Any) -> None:
        self.sent: list[Any] = []
        self.is_connected = self.is_watched = True
        self.dropped: dict[str, int] = {}
        TAPES.append(self)

    def set_preamble(self, messages: Sequence[Any]) -> None:
        self.sent += [message for message in messages if isinstance(message, Layout) and message not in self.sent]

    has_news = False

    def send(self, message: Any) -> bool:
        self.sent.append(as_message(message))
        return True

    def await_agent(self, timeout_seconds: float) -> bool:
        return True

    def take(self) -> list[Any]:
        return []

    def notes(self) -> list[str]:
        return []

    def close(self, timeout_seconds: float = 0.0) -> None:
        pass


TAPES: list[Tape] = []


class _Switched(Dataset[Item]):
    """A dataset that a fork can change under the loader."""

    def __init__(self, dataset: Dataset[Item]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Item:
        return self.dataset[index]


@dataclass(slots=True)
class _Rate:
    """A schedule that a fork can change under the scheduler."""

    schedule: Schedule

    def __call__(self, step: int) -> float:
        return self.schedule(step)


@dataclass(slots=True)
class Trunk(Fault):
    """No fault of its own; forks where another enters."""

    branches: list[Wanted]
    current: Wanted
    training: Training | None = None
    watch: Any = None
    fault: Fault = field(default_factory=Fault)
    is_branch: bool = False
    rate: _Rate | None = None
    data: _Switched | None = None

    def schedule(self, schedule: Schedule) -> Schedule:
        self.rate = _Rate(schedule)
        return self.rate

    def dataset(self, dataset: Dataset[Item]) -> Dataset[Item]:
        self.data = _Switched(dataset)
        return self.data

    def before_step(self, step: int) -> None:
        if not self.is_branch:
            for branch in self.branches:
                assert branch.fault_step is not None
                if branch.fault_step - FORK_AHEAD == step and self._fork():
                    self._enter(branch)
                    break
        self.fault.before_step(step)

    def _fork(self) -> bool:
        """True in the child; the parent returns when the child has ended."""
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            _, status = os.waitpid(pid, 0)
            if status:
                raise RuntimeError(f"a branch failed with status {status}")
        return pid == 0

    def _enter(self, branch: Wanted) -> None:
        assert self.training is not None
        assert self.rate is not None
        assert self.data is not None
        self.is_branch, self.current = True, branch
        # The watch takes a forked child for a data loader's worker and would stay silent in it.
        self.watch._pid = os.getpid()
        self.fault = make_fault(branch, self.training)
        self.rate.schedule = self.fault.schedule(self.rate.schedule)
        self.data.dataset = self.fault.dataset(self.data.dataset)
        self.fault.enter(self.training.model)


def make_fault(run: Wanted, training: Training) -> Fault:
    assert run.fault_step is not None
    if run.scenario in record_faults.FAULTS:
        return record_faults.FAULTS[run.scenario][2](training, run.fault_step, run.layer)
    setting = Setting(config=run.config, fault_step=run.fault_step, layer=run.layer or None)
    return SCENARIOS[run.scenario].make(setting)


class _Done(Exception):
    """Raised after the last step to be recorded."""


def record(trunk_run: Wanted, branches: list[Wanted], raw: Path) -> None:
    """Train a trunk and its branches; each writes its recording."""
    trunk = Trunk(branches, trunk_run)
    training = build(trunk_run.config, trunk)
    settings = Settings(dir=raw / "run", report=False)
    watch = fp8watch.attach(
        training.model, training.optimizer, lr_scheduler=training.scheduler, dataloader=training.loader,
        run=trunk_run.name, settings=settings,
    )  # fmt: skip
    trunk.training, trunk.watch = training, watch
    is_there = _path(trunk_run, raw).exists()
    end = max([0 if is_there else trunk_run.last_step, *(branch.fault_step or 0 for branch in branches)])

    def report(step: int, loss: float) -> None:
        if step >= (trunk.current.last_step if trunk.is_branch else end):
            raise _Done

    try:
        with contextlib.suppress(_Done):
            train(training, watch, report)
        watch.detach()
        if trunk.is_branch or not is_there:
            _write(trunk.current, TAPES[-1].sent, raw)
    except BaseException:
        if trunk.is_branch:
            traceback.print_exc()
            os._exit(1)
        raise
    if trunk.is_branch:
        os._exit(0)


def _write(run: Wanted, sent: Iterable[Any], raw: Path) -> None:
    messages = list(sent)
    frames = [m for m in messages if isinstance(m, StepFrame) and m.step <= run.last_step]
    layouts = [m for m in messages if isinstance(m, Layout)]
    facts = {
        "scenario": run.scenario, "seed": run.seed, "cause": run.cause, "fault_step": run.fault_step,
        "layer": run.layer or None, "held_out": run.seed in HELD_OUT, "steps": run.config.steps,
    }  # fmt: skip
    recorded = frames_file.RecordedRun(run=run.name, frames=frames, layouts=layouts, notes=facts)
    frames_file.write(_path(run, raw), [recorded])
    print(f"{run.name}: {len(frames)} steps, fault {run.fault_step} {run.layer}", flush=True)


def _path(run: Wanted, raw: Path) -> Path:
    return raw / f"{run.name}{frames_file.SUFFIX}"


def _acts(run: frames_file.RecordedRun) -> list[tuple[int, str, str]]:
    pipeline = Pipeline(run.run)
    return [
        (finding.step, finding.detector, finding.cause)
        for sample in run.samples()
        for finding in pipeline.observe(sample)
        if finding.severity == "act"
    ]


def pack(seed: int, raw: Path, out: Path) -> None:
    """Pack the raw recordings of a seed into one small file; says where rounding changed what is found."""
    plans = wanted(seed)
    runs = []
    for plan in (plan for plan in plans if _path(plan, raw).exists()):
        (exact,) = frames_file.load(_path(plan, raw))
        exact = replace(exact, frames=[frame for frame in exact.frames if frame.step <= plan.last_step])
        small = _rounded_run(exact)
        if _acts(exact) != _acts(small):
            print(f"{exact.run}: rounding changes {_acts(exact)} to {_acts(small)}")
        runs.append(small)
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"seed{seed}{frames_file.SUFFIX}"
    frames_file.write(target, runs)
    print(f"{target}: {len(runs)} of {len(plans)} runs, {target.stat().st_size} bytes")


def _rounded_run(run: frames_file.RecordedRun) -> frames_file.RecordedRun:
    fault_step = run.notes["fault_step"]
    return replace(run, frames=[rounded(frame, fault_step) for frame in run.frames])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", action="append", type=int)
    parser.add_argument("--scenario", action="append")
    parser.add_argument("--raw", type=Path, default=Path("recorded-raw"))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--pack-only", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    assemble.Channel = Tape  # type: ignore[attr-defined]
    chosen.raw.mkdir(parents=True, exist_ok=True)
    for seed in chosen.seed or SEEDS:
        if not chosen.pack_only:
            record_seed(seed, chosen.scenario, chosen.raw)
        pack(seed, chosen.raw, chosen.out)
    return 0


def record_seed(seed: int, scenarios: Sequence[str] | None, raw: Path) -> None:
    """Record the runs of a seed that do not exist yet."""
    runs = wanted(seed)
    missing = [run for run in runs if not _path(run, raw).exists()]
    missing = [run for run in missing if scenarios is None or run.scenario in scenarios]
    missing = [run for run in missing if seed not in LATER or run.scenario in LATER[seed]]
    trunks = {run.trunk: next(t for t in runs if t.scenario == run.trunk) for run in missing}
    for name, trunk in trunks.items():
        record(trunk, [run for run in missing if run.trunk == name and run is not trunk], raw)


if __name__ == "__main__":
    sys.exit(main())
