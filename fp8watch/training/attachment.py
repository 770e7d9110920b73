"""`fp8watch.attach`: puts a watch on a model and its optimizer.

The module is not called `attach`, because importing a module sets an attribute of its name in the package, which would
hide the function.

All user errors (in policy, arguments or settings) are reported before a process, thread or hook is started. Later
errors of fp8watch leave training as it was.
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
    """The arguments of an attach, and its watch."""

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
    """Watch a model while it trains. Without a policy, nothing is ever changed.

    Every argument except model and optimizer is optional. Actions that need a missing one are reported as unavailable.
    - `policy`: a file, the name of a shipped policy, or YAML text. None: observe.
    - `forward`: runs the next batch forward and returns its loss (for `recheck`).
    - `mesh`: a `DeviceMesh` with dimensions named `tp` and `pp`, or a mapping from these names to process groups. Ranks
      of one `tp` group have to use the same scale for a tensor. `watch.clip_grad_norm_` takes the norm over all `pp`
      stages.
    - `also`: further objects with `state_dict` and `load_state_dict`, by name, that checkpoints hold and a rollback
      restores: a moving average of the weights, a second model or optimizer, counters of the loop. Nothing else outside
      the model is restored.

    A second call with the same arguments returns the same watch. With several ranks, this is a collective call if the
    policy acts (waiting is limited by `Settings.join_seconds`), or if neither launcher nor arguments name the run. If
    the policy acts, it waits up to `Settings.start_seconds` for the controller, so that it can respond to a fault in
    the first steps.

    Raises `Refused` for bad arguments, policies and settings. It names all errors, is a `BadInput`, and ends the
    process with exit code 2 if it is not caught. `WrongArgument`, which is a `TypeError` too, is the `Refused` for an
    argument of the wrong kind. Raises `ValueError` for a second attach with other arguments, and `Halted` for a run
    that was halted and not released.
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
    # Imports and copies of schedulers may draw random numbers.
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
        watch.note_once(
            f"still attached to other models, which stay in memory: {names}; detach() of their watches frees them"
        )
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
        watch.note_once("no agent has answered yet; training starts, and fp8watch takes no action until one does")
    return watch


def _inputs(arguments: dict[str, Any], wrong: list[str]) -> tuple[str, str, Policy, Settings]:
    """The policy's text, name and content, and the settings. Raises `BadInput` with all errors, `wrong` included."""
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
    """Detach a watch that is still attached; the reason says whether the interpreter exits because of an error."""
    watch = reference()
    if watch is None or os.getpid() != pid:
        return
    kind = getattr(sys, "last_type", None)
    watch.detach("end" if kind is None else f"error: {kind.__name__}")
