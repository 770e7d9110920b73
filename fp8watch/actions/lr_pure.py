"""Decides which schedulers may be evaluated at other steps: those without side effects.

A schedule that counts its own calls, draws random numbers or prints must be called only by the user: an extra call
could change its later LRs, and so the weights. Torch's own classes are accepted by exact type. A function given to
LambdaLR or MultiplicativeLR is accepted if its bytecode shows that it is pure.
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import functools
import inspect
import math
import types
from typing import Any

import numpy
from torch.optim import lr_scheduler as torch_schedulers

_PLAIN = (
    torch_schedulers.ConstantLR, torch_schedulers.LinearLR, torch_schedulers.PolynomialLR,
    torch_schedulers.ExponentialLR, torch_schedulers.StepLR, torch_schedulers.MultiStepLR,
    torch_schedulers.CosineAnnealingLR, torch_schedulers.CosineAnnealingWarmRestarts, torch_schedulers.OneCycleLR,
)  # fmt: skip
_OF_OTHERS = (torch_schedulers.SequentialLR, torch_schedulers.ChainedScheduler)
_OF_FUNCTIONS = (torch_schedulers.LambdaLR, torch_schedulers.MultiplicativeLR)
_METHODS = ("step", "get_lr", "_get_closed_form_lr")
_VALUES = (int, float, complex, bool, str, bytes, type(None))
_MODULES = (math, numpy)
_ATTRIBUTES = frozenset(name for name in dir(math) if not name.startswith("_")) | {"maximum", "minimum", "clip"}
_BUILTINS = frozenset({
    "abs", "all", "any", "bool", "divmod", "float", "int", "len", "max", "min", "pow", "range", "round", "sum",
    "tuple", "zip", "enumerate", "ValueError", "TypeError", "AssertionError",
})  # fmt: skip
_REFUSED = ("STORE_", "DELETE_", "IMPORT_", "LOAD_SUPER", "LOAD_BUILD_CLASS", "LOAD_NAME", "LOAD_FROM_DICT")
_LOCAL = ("STORE_FAST", "DELETE_FAST")
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def why_not_ahead(scheduler: Any) -> str | None:
    """Why a scheduler must not be evaluated at other steps, or None if it may."""
    kind, name = type(scheduler), type(scheduler).__name__
    if kind not in (*_PLAIN, *_OF_OTHERS, *_OF_FUNCTIONS):
        return f"{name} is not run ahead: it may have state of its own"
    if any(method in vars(scheduler) for method in _METHODS):
        return f"{name} is not run ahead: its methods were replaced"
    if kind in _OF_OTHERS:
        return next((why for part in scheduler._schedulers if (why := why_not_ahead(part)) is not None), None)
    if kind in _OF_FUNCTIONS and not all(_is_pure(function, set()) for function in scheduler.lr_lambdas):
        return f"{name} is not run ahead: its function may have state of its own"
    return None


def _is_pure(function: Any, seen: set[int]) -> bool:
    if id(function) in seen:
        return True
    seen.add(id(function))
    if type(function) is functools.partial:
        values = (*function.args, *function.keywords.values())
        return _is_pure(function.func, seen) and all(_is_harmless(value, seen) for value in values)
    if type(function) is types.FunctionType:
        return _computes_only(function, frozenset(), seen)
    if dataclasses.is_dataclass(function) and not isinstance(function, type):
        return _is_pure_dataclass(function, seen)
    return False


def _is_pure_dataclass(function: Any, seen: set[int]) -> bool:
    kind = type(function)
    call = kind.__dict__.get("__call__")
    fields = frozenset(field.name for field in dataclasses.fields(function))
    reads_plainly = "__getattribute__" not in {name for base in kind.__mro__[:-1] for name in vars(base)}
    is_frozen = kind.__dataclass_params__.frozen and reads_plainly
    if not is_frozen or type(call) is not types.FunctionType or fields & _properties(kind):
        return False
    values = [getattr(function, name) for name in fields]
    return all(_is_harmless(value, seen) for value in values) and _computes_only(call, fields, seen)


def _properties(kind: type) -> set[str]:
    """Names of the properties of a class, whose access runs code."""
    return {name for base in kind.__mro__ for name, value in vars(base).items() if isinstance(value, property)}


def _computes_only(function: types.FunctionType, fields: frozenset[str], seen: set[int]) -> bool:
    if function.__code__.co_flags & _GENERATORS:
        return False
    try:
        held = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # an empty cell
        return False
    held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return all(_is_harmless(value, seen) for value in held) and _is_pure_code(
        function.__code__, function.__globals__, fields, seen
    )


def _is_pure_code(code: types.CodeType, names: dict[str, Any], fields: frozenset[str], seen: set[int]) -> bool:
    for step in dis.get_instructions(code):
        operation, value = step.opname, step.argval
        if operation == "LOAD_GLOBAL":
            if value in names:
                found = names[value]
                if not _is_harmless(found, seen) and not any(found is module for module in _MODULES):
                    return False
            elif value not in _BUILTINS or not hasattr(builtins, value):
                return False
        elif operation in ("LOAD_ATTR", "LOAD_METHOD"):
            if value not in _ATTRIBUTES and value not in fields:
                return False
        elif operation == "STORE_DEREF":
            if value in code.co_freevars:
                return False
        elif operation.startswith(_REFUSED) and not operation.startswith(_LOCAL):
            return False
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return all(_is_pure_code(one, names, fields, seen) for one in inner)


def _is_harmless(value: Any, seen: set[int]) -> bool:
    """Whether a value is immutable or a pure function."""
    if type(value) in _VALUES:
        return True
    if type(value) in (tuple, frozenset):
        return all(_is_harmless(item, seen) for item in value)
    if type(value) is types.BuiltinFunctionType:
        return getattr(math, value.__name__, None) is value
    return _is_pure(value, seen)
