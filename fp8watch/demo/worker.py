"""One training in a separate process: `python -m fp8watch.demo.worker SPEC`, with SPEC a `RunSpec` as JSON.

Writes one JSON line per step to standard output, `{"step": 12, "loss": 2.71}`; a replayed step is written again. Losses
that are not finite are written as NaN and Infinity, which Python's own JSON reader accepts.
"""

from __future__ import annotations

import json
import sys

import msgspec
import torch

from fp8watch.demo.config import RunSpec
from fp8watch.demo.scenarios.base import Fault, Setting
from fp8watch.demo.scenarios.catalogue import SCENARIOS
from fp8watch.demo.trainer import Bare, Training, Watched, build, train


def make_fault(spec: RunSpec) -> Fault:
    """The fault of the spec's scenario."""
    if spec.fault_step is None:
        return Fault()
    setting = Setting(config=spec.config, fault_step=spec.fault_step, layer=spec.layer)
    return SCENARIOS[spec.scenario].make(setting)


def attach(spec: RunSpec, training: Training) -> Watched:
    """The lines that a user adds to a loop."""
    import fp8watch

    assert spec.checkpoints is not None
    watch = fp8watch.attach(
        training.model,
        training.optimizer,
        lr_scheduler=training.scheduler,
        dataloader=training.loader,
        checkpoints=fp8watch.Checkpoints(spec.checkpoints, every=25),
        policy=spec.policy,
        run=spec.run,
    )
    watch.resume()
    return watch


def write(step: int, loss: float) -> None:
    """Write one line and flush it, because the screen is live."""
    sys.stdout.write(json.dumps({"step": step, "loss": loss}) + "\n")
    sys.stdout.flush()


def main(argv: list[str]) -> None:
    """Run one spec to its end."""
    spec = msgspec.json.decode(argv[1], type=RunSpec)
    torch.set_num_threads(1)
    training = build(spec.config, make_fault(spec))
    watch: Watched = Bare() if spec.run is None else attach(spec, training)
    train(training, watch, write)


if __name__ == "__main__":
    main(sys.argv)
