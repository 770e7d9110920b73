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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fp8watch import policy as policies
from fp8watch import rng
from fp8watch.checkpoints import Checkpoints
from fp8watch.errors import BadInput, Refused, WrongArgument
from fp8watch.policy.load import parse, read
from fp8watch.policy.schema import Policy
from fp8watch.settings import Settings, from_environment
from fp8watch.training import namesake, report
from fp8watch.training.agreement.groups import read_groups
from fp8watch.training.arguments import problems
from fp8watch.training.assemble import Arguments, assemble
from fp8watch.training.watch import Watch
from fp8watch.transport import places

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
    also: Mapping[str, Any] | None = None,
) -> Watch:
    """Watch a model while it trains; without a policy nothing is ever changed.

    Every argument but model and optimizer is optional; an action whose handle is missing is reported as unavailable.
    `policy`: a file, the name of a shipped policy, or YAML text; None: observe. `forward`: runs the coming batch
    forward and returns its loss (for `recheck`). `mesh`: how the model is cut up, a `DeviceMesh` with dimensions named
    `tp` and `pp`, or process groups of these names: ranks of one `tp` group have to use one scale for a tensor, and
    `watch.clip_grad_norm_` takes the norm over all `pp` stages. A second call with the same arguments returns the same
    watch.
    `also`: names of whatever else checkpoints hold and a rollback restores, anything with `state_dict` and
    `load_state_dict`: a moving average of the weights, a second model or optimizer, counters of the loop. What is
    neither given here nor part of the model is not restored.
    With several ranks this is a collective call when the policy acts (`Settings.join_seconds` limits the waiting), or
    when there is no run name from launcher or argument. With a policy that acts it waits for the process that decides
    (at most `Settings.start_seconds`), so that a fault in the first steps is answered in time.

    Raises `Refused`, a `BadInput` that ends the process with exit code 2 unless it is caught, for bad arguments,
    policies and settings, all of them named at once (`WrongArgument`, a `TypeError` too, where an argument is not what
    it should be); `ValueError` for a second attach with other arguments; `Halted` for a run that was halted and not
    released.
    """
    arguments = {
        "model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler, "dataloader": dataloader,
        "checkpoints": checkpoints, "policy": policy, "scaler": scaler, "mesh": mesh, "run": run,
        "settings": settings, "forward": forward, "also": also,
    }  # fmt: skip
    wrong = problems(arguments)
    known = None if wrong else _known(model, optimizer, arguments)
    if known is not None:
        return known
    # Libraries that are loaded for the first time, and copies of schedulers, may draw random numbers.
    generators = rng.snapshot()
    try:
        return _attach(arguments, wrong)
    except BadInput as error:
        sys.stderr.write(f"{error}\n")
        raise (WrongArgument if wrong else Refused)(error.problems) from None
    finally:
        rng.restore(generators)


def _attach(arguments: dict[str, Any], wrong: list[str]) -> Watch:
    text, name, parsed, settings = _inputs(arguments, wrong)
    policy = arguments["policy"]
    groups = read_groups(arguments["mesh"])
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
            also=dict(arguments["also"] or {}),
            policy=parsed,
            policy_text=None if policy is None else text,
            policy_name="observe" if policy is None else name,
            arms_skip_update=policies.arms_skip_update(parsed),
            groups=groups,
        )
    )
    watch = made.watch
    if groups.remark:
        watch.note_once(groups.remark)
    data = made.session.context.data
    if data is not None and data.unavailable is not None:
        watch.note_once(f"data position: {data.unavailable}")
    if _attached:
        names = ", ".join(entry.watch.run for entry in _attached)
        watch.note_once(f"still attached to other models, which are kept alive by it: {names}; detach() lets go")
    entry = _Attached(watch, arguments)
    _attached.append(entry)
    who, release = namesake.claim(places.run_folder(settings.dir, watch.run), watch.rank)
    if who:
        watch.note_once(namesake.warning(watch.run, who))

    def forget() -> None:
        release()
        if entry in _attached:
            _attached.remove(entry)

    made.session.on_detach = forget
    atexit.register(_at_exit, weakref.ref(watch), os.getpid())
    if made.session.identity.rank == 0 and settings.report:
        report.say(made.report)
    session = made.session
    can_act = parsed.mode != "observe" and not (session.agreement.unavailable or session.journal.unavailable)
    if can_act and settings.start_seconds > 0 and not session.uplink.await_agent(settings.start_seconds):
        watch.note_once("the process that decides is not there yet; training begins, and nothing acts until it is")
    return watch


def _inputs(arguments: dict[str, Any], wrong: list[str]) -> tuple[str, str, Policy, Settings]:
    """The policy's text, name and content, and the settings. Raises `BadInput` with all that is wrong anywhere."""
    found = list(wrong)
    text, name, parsed = "", "", Policy(version=1)
    settings = arguments["settings"]
    if isinstance(arguments["policy"], str | Path | None):
        try:
            text, name = read(arguments["policy"])
            parsed = parse(text, name)
        except BadInput as error:
            found += error.problems
    if settings is None:
        try:
            settings = from_environment()
        except BadInput as error:
            found += error.problems
    if found:
        raise BadInput(found)
    return text, name, parsed, settings


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
    if name == "also":
        first, second = first or {}, second or {}
        return first.keys() == second.keys() and all(first[key] is second[key] for key in first)
    return bool(first == second) if name in _BY_VALUE else first is second


def _at_exit(reference: weakref.ref[Watch], pid: int) -> None:
    """Say goodbye for a watch that nobody detached, and whether the interpreter ends for an error."""
    watch = reference()
    if watch is None or os.getpid() != pid:
        return
    kind = getattr(sys, "last_type", None)
    watch.detach("end" if kind is None else f"error: {kind.__name__}")
