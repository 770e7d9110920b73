"""YAML of a policy file as nodes that know their lines. Text that is too deep, too long or too large is not parsed."""

from __future__ import annotations

from typing import Any

from fp8watch import bounds
from fp8watch.errors import BadInput

MAX_POLICY_BYTES = 64 * 1024
"""Nothing longer is a policy file (the shipped ones have 8 KB): the parser reads about 32 KB per second at worst."""
MAX_DEPTH = 32
"""Brackets open at once. A policy needs five; the parser's time grows with their square."""
MAX_POLICY_VALUES = 100_000
"""Keys and values, with every alias counted as what it stands for: a few lines of aliases can mean billions."""


def parse(text: str, name: str) -> Any:
    """The document with its line numbers. Raises `BadInput`."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    _bounded(text, name)
    parser = YAML(typ="rt", pure=True)
    try:
        return parser.load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        reason = " ".join(str(error.problem or error.context or "malformed").split())
        raise BadInput([f"{name}:{line}: yaml: {reason}"]) from error
    except Exception as error:
        # The parser raises plain Python errors for some malformed texts (odd tags, dates, numbers, deep nesting).
        reason = " ".join(str(error).split())
        if not isinstance(error, YAMLError | ValueError) or not reason:
            reason = f"{type(error).__name__}: {reason}".removesuffix(": ")
        raise BadInput([f"{name}:{_line(error)}: yaml: {reason}"]) from error


def _line(error: Exception) -> int:
    """The line of the node that the parser failed at; 1 where it was at none."""
    line, trace = 1, error.__traceback__
    while trace is not None:
        mark = getattr(trace.tb_frame.f_locals.get("node"), "start_mark", None)
        line = mark.line + 1 if mark is not None else line
        trace = trace.tb_next
    return line


def too_long(name: str) -> str:
    """The problem reported for a text that is too long for a policy."""
    return f"{name}:1: policy: longer than {MAX_POLICY_BYTES} bytes"


def _bounded(text: str, name: str) -> None:
    if len(text.encode("utf-8", errors="replace")) > MAX_POLICY_BYTES:
        raise BadInput([too_long(name)])
    depth = 0
    for number, line in enumerate(text.splitlines(), start=1):
        # Brackets in quotes and comments count too: there they are balanced, or few.
        for character in line:
            if character in "[{":
                depth += 1
            elif character in "]}":
                depth = max(0, depth - 1)
            if depth > MAX_DEPTH:
                raise BadInput([f"{name}:{number}: yaml: more than {MAX_DEPTH} brackets are open"])


def plain(document: Any, name: str) -> Any:
    """The document as plain values. Raises `BadInput` when it stands for more values than any policy has."""
    try:
        return _Plain()(document)
    except (_TooMany, RecursionError) as error:
        reason = f"more than {MAX_POLICY_VALUES} values, or an alias inside of what it stands for"
        raise BadInput([f"{name}:1: policy: {reason}"]) from error
    except _TooLarge as error:
        raise BadInput([f"{name}:1: policy: a whole number beyond 2^53"]) from error


class _TooLarge(Exception):
    """A whole number that neither a wire nor a store can carry."""


class _TooMany(Exception):
    """More values than any policy has."""


class _Plain:
    """The parser's annotated nodes as plain values, so that strict types see int, float, str and bool."""

    def __init__(self) -> None:
        self._left = MAX_POLICY_VALUES

    def __call__(self, node: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise _TooMany
        if isinstance(node, dict):
            return {self(key): self(value) for key, value in node.items()}
        if isinstance(node, list):
            return [self(value) for value in node]
        for kind in (bool, int, float, str):
            if isinstance(node, kind):
                value = kind(node)
                if isinstance(value, int) and abs(value) > bounds.LARGEST:
                    raise _TooLarge
                return value
        if type(node).__name__ == "ScalarBoolean":
            return bool(node)
        return node
