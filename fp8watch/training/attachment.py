"""`fp8watch.attach`: puts a watch on a model and its optimizer.

The module has another name than the function, which it would hide: importing `fp8watch.x` sets that attribute.

All that a person can have got wrong (policy, arguments, settings) is found before anything is started: no process,
no thread, no hook. What goes wrong on our side afterwards leaves training as it was.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fp8watch import policy as policies
from fp8watch import rng
from fp8watch.checkpoints import Checkpoints
from fp8watch.errors import BadInput, Refused
from fp8watch.policy.load import parse, read
from fp8watch.settings import Settings, from_environment
from fp8watch.training import report
from fp8watch.training.assemble import Arguments, assemble
from fp8watch.training.watch import Watch

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Attached:
    """What an attach was called with, and the watch it made."""

    watch: Watch
    arguments: dict[str, Any]


_attached: list[_Attached] = []
"""Watches that are attached now, in this process."""

_BY_VALUE = frozenset({"policy", "run", "checkpoints", "settings"})


def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    lr_scheduler: Any | None = None,
    dataloader: Any | None = None,
    checkpoints: Checkpoints | None = None,
    policy: str | Path | None = None,
    scaler: Any | None = None,
    mesh: Any | None = None,
    run: str | None = None,
    settings: Settings | None = None,
    forward: Callable[[], torch.Tensor] | None = None,
) -> Watch:
    """Watch a model while it trains; without a policy nothing is ever changed.

    Every argument but model and optimizer is optional; an action whose handle is missing is reported as unavailable.
    `policy`: a file, the name of a shipped policy, or YAML text; None: observe. `forward`: runs the coming batch
    forward and returns its loss (for `recheck`). A second call with the same arguments returns the same watch.
    With several ranks this is a collective call when the policy acts (`Settings.join_seconds` limits the waiting), or
    when there is no run name from launcher or argument. With a policy that acts it waits for the process that decides
    (at most `Settings.start_seconds`), so that a fault in the first steps is answered in time.

    Raises `Refused`, a `BadInput` that ends the process with exit code 2 unless it is caught, for a bad policy or
    setting, `ValueError` for a second attach with other arguments, `TypeError`
    for a model or optimizer that is none, `Halted` for a run that was halted and not released.
    """
    arguments = {
        "model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler, "dataloader": dataloader,
        "checkpoints": checkpoints, "policy": policy, "scaler": scaler, "mesh": mesh, "run": run,
        "settings": settings, "forward": forward,
    }  # fmt: skip
    _check_types(model, optimizer, checkpoints)
    known = _known(model, optimizer, arguments)
    if known is not None:
        return known
    # Libraries that are loaded for the first time, and copies of schedulers, may draw random numbers.
    generators = rng.snapshot()
    try:
        return _attach(arguments, settings)
    except BadInput as error:
        sys.stderr.write(f"{error}\n")
        raise Refused(error.problems) from None
    finally:
        rng.restore(generators)


def _attach(arguments: dict[str, Any], settings: Settings | None) -> Watch:
    policy = arguments["policy"]
    text, name = read(policy)
    parsed = parse(text, name)
    if settings is None:
        settings = from_environment()
    made = assemble(
        Arguments(
            model=arguments["model"],
            optimizer=arguments["optimizer"],
            lr_scheduler=arguments["lr_scheduler"],
            dataloader=arguments["dataloader"],
            checkpoints=arguments["checkpoints"],
            scaler=arguments["scaler"],
            run=arguments["run"],
            settings=settings,
            forward=arguments["forward"],
            policy=parsed,
            policy_text=None if policy is None else text,
            policy_name="observe" if policy is None else name,
            arms_skip_update=policies.arms_skip_update(parsed),
        )
    )
    watch = made.watch
    if arguments["mesh"] is not None:
        watch.note_once("mesh= is not used yet: all ranks of the job act together")
    if _attached:
        names = ", ".join(entry.watch.run for entry in _attached)
        watch.note_once(f"still attached to other models, which are kept alive by it: {names}; detach() lets go")
    entry = _Attached(watch, arguments)
    _attached.append(entry)
    made.session.on_detach = lambda: _attached.remove(entry) if entry in _attached else None
    atexit.register(_at_exit, weakref.ref(watch), os.getpid())
    if made.session.identity.rank == 0 and settings.report:
        report.say(made.report)
    session = made.session
    can_act = parsed.mode != "observe" and not (session.agreement.unavailable or session.journal.unavailable)
    if can_act and settings.start_seconds > 0 and not session.uplink.await_agent(settings.start_seconds):
        watch.note_once("the process that decides is not there yet; training begins, and nothing acts until it is")
    return watch


def _check_types(model: Any, optimizer: Any, checkpoints: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"attach(model): a torch.nn.Module is wanted, got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"attach(optimizer): a torch.optim.Optimizer is wanted, got {type(optimizer).__name__}")
    if checkpoints is not None and not isinstance(checkpoints, Checkpoints):
        raise TypeError(f'attach(checkpoints): fp8watch.Checkpoints("dir", every=200) is wanted, got {checkpoints!r}')


def _known(model: torch.nn.Module, optimizer: torch.optim.Optimizer, arguments: dict[str, Any]) -> Watch | None:
    for entry in _attached:
        if entry.arguments["model"] is not model and entry.arguments["optimizer"] is not optimizer:
            continue
        different = [name for name, value in arguments.items() if not _same(name, value, entry.arguments[name])]
        if different:
            raise ValueError(
                f"this model or optimizer is watched already, with other arguments ({', '.join(different)}); "
                "call detach() on the first watch before"
            )
        entry.watch.note_once("attach was called again with the same arguments: the same watch is returned")
        return entry.watch
    return None


def _same(name: str, first: Any, second: Any) -> bool:
    return bool(first == second) if name in _BY_VALUE else first is second


def _at_exit(reference: weakref.ref[Watch], pid: int) -> None:
    """Say goodbye for a watch that nobody detached, and whether the interpreter ends for an error."""
    watch = reference()
    if watch is None or os.getpid() != pid:
        return
    kind = getattr(sys, "last_type", None)
    watch.detach("end" if kind is None else f"error: {kind.__name__}")
