"""The memory of a run's controller as bytes, so that a standby continues exactly where another one stopped.

It holds the state of this package's objects, attribute by attribute: numbers, text, containers, records and
dataclasses. Functions, settings, policies and objects of other libraries are left out: `recall` writes the memory over
a freshly made object, which has its own. Objects with `dump` and `load` (`fp8watch.detect.pipeline.Pipeline`) encode
themselves. Decoding executes nothing: it accepts only classes of this package and fills them without calling them.
"""

from __future__ import annotations

import importlib
from collections import Counter, deque
from dataclasses import is_dataclass
from typing import Any

import msgspec

VERSION = 1
_PLAIN = (bool, int, float, str, bytes, type(None))
_SKIP = object()


class Remembered(msgspec.Struct, frozen=True):
    """A memory with the version of its format."""

    version: int
    package: str
    """Version of fp8watch that wrote it. Another version does not use it and starts from the stored records."""
    state: Any


def remember(root: object, leave_out: frozenset[str] = frozenset()) -> Any:
    """The state of `root` as plain containers, without attributes whose name, at any depth, is in `leave_out`."""
    return _attributes(root, leave_out)


def recall(root: object, state: Any) -> None:
    """Write a memory over an object of the same class, in place. Raises `ValueError` if it does not fit."""
    try:
        for name, value in state.items():
            _set(root, name, value)
    except (AttributeError, KeyError, TypeError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"memory does not fit: {type(error).__name__}: {error}") from error


def encode(state: Any, package: str) -> bytes:
    """A memory as msgpack."""
    return msgspec.msgpack.encode(Remembered(VERSION, package, state))


def decode(data: bytes, package: str) -> Any:
    """The inverse of `encode`. Raises `ValueError` for a memory of another version."""
    try:
        found = msgspec.msgpack.decode(data, type=Remembered)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(str(error)) from error
    if (found.version, found.package) != (VERSION, package):
        raise ValueError(f"written by version {found.package}/{found.version}, this is {package}/{VERSION}")
    return found.state


def _attributes(value: object, leave_out: frozenset[str]) -> dict[str, Any]:
    found = {}
    for name, item in _fields(value):
        if name not in leave_out and (kept := _keep(item, leave_out)) is not _SKIP:
            found[name] = kept
    return found


def _fields(value: object) -> list[tuple[str, Any]]:
    names = dict.fromkeys(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        names |= dict.fromkeys(getattr(kind, "__slots__", ()))
    return [(name, getattr(value, name)) for name in names if name != "__weakref__" and hasattr(value, name)]


def _keep(value: Any, leave_out: frozenset[str]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Counter | dict):
        name = "counter" if isinstance(value, Counter) else "dict"
        pairs = [[_keep(k, leave_out), _keep(v, leave_out)] for k, v in value.items()]
        return _SKIP if any(v is _SKIP for _, v in pairs) else [name, pairs]
    if kind in (list, tuple, set, frozenset, deque):
        items = [_keep(item, leave_out) for item in value]
        if any(item is _SKIP for item in items):
            return _SKIP
        return [kind.__name__, items, value.maxlen] if kind is deque else [kind.__name__, items]
    if isinstance(value, msgspec.Struct) or is_dataclass(value):
        return ["record", _name(kind), msgspec.msgpack.encode(value)]
    if not kind.__module__.startswith("fp8watch") or callable(value):
        return _SKIP
    if hasattr(value, "dump") and hasattr(value, "load"):
        return ["dump", value.dump()]
    if hasattr(kind, "model_fields"):  # settings and policies
        return _SKIP
    return ["object", _name(kind), _attributes(value, leave_out)]


def _set(owner: object, name: str, value: Any) -> None:
    if isinstance(value, list) and value[0] == "dump":
        getattr(owner, name).load(value[1])
    elif isinstance(value, list) and value[0] == "object" and type(getattr(owner, name, None)) is _class(value[1]):
        recall(getattr(owner, name), value[2])
    else:
        setattr(owner, name, _restored(value))


def _restored(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value[0], value[1]
    if kind in ("dict", "counter"):
        pairs = {_restored(k): _restored(v) for k, v in content}
        return Counter(pairs) if kind == "counter" else pairs
    if kind == "deque":
        return deque((_restored(item) for item in content), maxlen=value[2])
    containers: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    if kind in containers:
        return containers[kind](_restored(item) for item in content)
    if kind == "record":
        return msgspec.msgpack.decode(value[2], type=_class(content))
    if kind == "object":
        made: object = object.__new__(_class(content))
        recall(made, value[2])
        return made
    raise KeyError(kind)


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(name: str) -> type:
    module, _, qualified = name.partition(":")
    if not module.startswith("fp8watch."):
        raise KeyError(f"{name} is no class of this package")
    found: Any = importlib.import_module(module)
    for part in qualified.split("."):
        found = getattr(found, part)
    if not isinstance(found, type):
        raise KeyError(f"{name} is no class")
    return found
