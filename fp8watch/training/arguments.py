"""Checks the arguments of `fp8watch.attach` before anything is started, and reports all errors, one line each.

Schedulers and scalers of any class are accepted if they have one of the expected methods, loaders if they can be
iterated. What else an action needs is reported in `watch.capabilities`.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fp8watch.checkpoints import Checkpoints
from fp8watch.foreign import attribute
from fp8watch.settings import Settings
from fp8watch.training import materialised
from fp8watch.training.agreement.groups import doubled_roles

_PLAIN = (bool, int, float, complex, str, bytes)
_OF_SCHEDULERS = ("step", "state_dict")
_OF_SCALERS = ("scale", "get_scale", "update", "is_enabled", "unscale_")
_OF_SAVED = ("state_dict", "load_state_dict")
_NAMEABLE = re.compile(r"[A-Za-z0-9_]")
_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def problems(arguments: Mapping[str, Any]) -> list[str]:
    """Errors in attach's arguments, as `file:line: argument: reason`. The line is that of the call. Optional arguments
    are not checked if they are None."""
    where = called_at()
    found = []
    for name, check in _CHECKS.items():
        value = arguments[name]
        if value is None and name not in ("model", "optimizer"):
            continue
        reason = check(value) or _unsaveable(name, value, arguments["checkpoints"]) or _not_there(name, arguments)
        if reason is not None:
            found.append(f"{where}: {name}: {reason}")
    return found


def called_at() -> str:
    """`file:line` of the innermost caller outside of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def shown(value: Any) -> str:
    """A value for a message: its class, and the value of a plain type if it is short."""
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    text = repr(value) if isinstance(value, (*_PLAIN, Path)) else ""
    kind = type(value).__name__
    return f"{kind} {text}" if text and len(text) <= 60 else kind


def _model(value: Any) -> str | None:
    return None if isinstance(value, torch.nn.Module) else f"a torch.nn.Module is wanted, got {shown(value)}"


def _optimizer(value: Any) -> str | None:
    return (
        None if isinstance(value, torch.optim.Optimizer) else f"a torch.optim.Optimizer is wanted, got {shown(value)}"
    )


def _scheduler(value: Any) -> str | None:
    wanted = "a learning-rate scheduler, with step() and state_dict(), is wanted"
    if isinstance(value, torch.optim.Optimizer):
        return f"{wanted}, got an optimizer ({type(value).__name__})"
    return None if _has_one(value, _OF_SCHEDULERS) else f"{wanted}, got {shown(value)}"


def _dataloader(value: Any) -> str | None:
    is_iterable = hasattr(type(value), "__iter__") or hasattr(type(value), "__getitem__")
    if is_iterable and not isinstance(value, (*_PLAIN, type, Path)):
        return None
    return f"the loader that the loop iterates is wanted, got {shown(value)}"


def _checkpoints(value: Any) -> str | None:
    if isinstance(value, Checkpoints):
        return None
    path = str(value) if isinstance(value, str | Path) else "ckpt"
    return f'fp8watch.Checkpoints("{path}", every=200) is wanted, got {shown(value)}'


def _policy(value: Any) -> str | None:
    if isinstance(value, str | Path):
        return None
    return f"a policy file, the name of a shipped policy or YAML text is wanted, got {shown(value)}"


def _scaler(value: Any) -> str | None:
    if _has_one(value, _OF_SCALERS):
        return None
    return f"a loss scaler such as torch.amp.GradScaler is wanted, got {shown(value)}"


def _mesh(value: Any) -> str | None:
    if dist.is_available() and type(value) is int and value == dist.GroupMember.NON_GROUP_MEMBER:
        return None  # `new_group` on a non-member
    is_none = isinstance(value, (*_PLAIN, type)) or (callable(value) and attribute(value, "__len__") is None)
    return f"a device mesh or process groups are wanted, got {shown(value)}" if is_none else doubled_roles(value)


def _run(value: Any) -> str | None:
    if not isinstance(value, str):
        return f"a name (str) is wanted, got {shown(value)}"
    if value and not _NAMEABLE.search(value):  # an empty name counts as none, as in FP8WATCH_RUN
        return f"{value!r} has no letter or digit (A-Z, a-z, 0-9), which the run's folder and metric label need"
    return None


def _settings(value: Any) -> str | None:
    if isinstance(value, Settings):
        return None
    return f"fp8watch.settings.Settings(...) is wanted, got {shown(value)}"


def _forward(value: Any) -> str | None:
    wanted = "a function without arguments that runs the coming batch and returns its loss is wanted"
    if not callable(value) or isinstance(value, type):
        return f"{wanted}, got {shown(value)}"
    try:
        inspect.signature(value.forward if isinstance(value, torch.nn.Module) else value).bind()
    except TypeError as error:
        return f"{wanted}, got {shown(value)} ({error})"
    except ValueError:  # a builtin without a signature
        return None
    return None


def _also(value: Any) -> str | None:
    wanted = 'a mapping from names to what else a rollback shall restore is wanted, such as {"ema": ema}'
    if not isinstance(value, Mapping) or not all(isinstance(name, str) and name for name in value):
        return f"{wanted}, got {shown(value)}"
    for name, thing in value.items():
        missing = [f"{method}()" for method in _OF_SAVED if not callable(attribute(thing, method))]
        if missing or isinstance(thing, type):
            return f"{name}: {shown(thing)} has no {' and no '.join(missing) or 'state'}"
    return None


def _unsaveable(name: str, value: Any, checkpoints: Any) -> str | None:
    """Why a scheduler or scaler cannot be saved in checkpoints; every save would fail."""
    if name not in ("lr_scheduler", "scaler") or not isinstance(checkpoints, Checkpoints):
        return None
    missing = [f"{method}()" for method in _OF_SAVED if not callable(attribute(value, method))]
    if not missing:
        return None
    return f"{type(value).__name__} has no {' and no '.join(missing)}, and so no checkpoint could hold it"


def _not_there(name: str, arguments: Mapping[str, Any]) -> str | None:
    """Parameters of the model or optimizer that have no values; each is named once."""
    if name == "model":
        return materialised.of_model(arguments["model"], arguments["optimizer"])
    return materialised.of_optimizer(arguments["optimizer"], arguments["model"]) if name == "optimizer" else None


def _has_one(value: Any, names: tuple[str, ...]) -> bool:
    return not isinstance(value, type) and any(callable(attribute(value, name)) for name in names)


_CHECKS: dict[str, Callable[[Any], str | None]] = {
    "model": _model, "optimizer": _optimizer, "lr_scheduler": _scheduler, "dataloader": _dataloader,
    "checkpoints": _checkpoints, "policy": _policy, "scaler": _scaler, "mesh": _mesh, "run": _run,
    "settings": _settings, "forward": _forward, "also": _also,
}  # fmt: skip
"""In the order of attach's signature."""
