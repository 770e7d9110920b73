"""Reading a policy: a file, a shipped policy's name, or the text itself; every error with file, line, field, reason."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fp8watch.errors import BadInput
from fp8watch.policy.schema import Policy

MAX_POLICY_BYTES = 1024 * 1024
"""Longer is no policy file: refuse it before parsing."""
MAX_POLICY_VALUES = 100_000
"""Keys and values, every alias counted as what it stands for: a few lines of aliases can mean billions."""


def shipped() -> list[str]:
    """Names of the policies that come with fp8watch."""
    folder = resources.files("fp8watch.policy") / "policies"
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def load(source: str | Path | None) -> Policy:
    """The policy in a file, of a shipped name, or in a text of several lines; None: observe.

    Raises `BadInput` with all problems as `file:line: field: reason`.
    """
    text, name = read(source)
    return parse(text, name)


def read(source: str | Path | None) -> tuple[str, str]:
    """The policy's text and what to call it in messages. Raises `BadInput` when there is none."""
    if source is None:
        source = "observe"
    if isinstance(source, str):
        if "\n" in source or ":" in source.split("/")[-1]:
            return source, "<policy>"
        if source in shipped():
            return (resources.files("fp8watch.policy") / "policies" / f"{source}.yaml").read_text("utf-8"), source
    path = Path(source)
    try:
        data = path.read_bytes()
    except OSError as error:
        names = ", ".join(shipped())
        raise BadInput([f"{path}:1: policy: {error.strerror or error}; shipped policies: {names}"]) from error
    try:
        return data.decode("utf-8"), str(path)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise BadInput([f"{path}:{line}: policy: not UTF-8 ({error.reason})"]) from error


def parse(text: str, name: str = "<policy>") -> Policy:
    """The policy in a YAML text. Raises `BadInput`."""
    document = _parse_yaml(text, name)
    if not isinstance(document, dict):
        found = "nothing" if document is None else "a list" if isinstance(document, list) else type(document).__name__
        raise BadInput([f"{name}:1: policy: a mapping with version and rules is wanted, found {found}"])
    try:
        plain = _Plain()(document)
    except (_TooMany, RecursionError) as error:
        reason = f"more than {MAX_POLICY_VALUES} values, or an alias inside of what it stands for"
        raise BadInput([f"{name}:1: policy: {reason}"]) from error
    try:
        return Policy.model_validate(plain)
    except ValidationError as error:
        problems = [
            (_line(document, issue["loc"]), _field(document, issue["loc"]), _reason(issue))
            for issue in error.errors(include_url=False)
        ]
        raise BadInput([f"{name}:{line}: {field}: {reason}" for line, field, reason in sorted(problems)]) from error


def _parse_yaml(text: str, name: str) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    if len(text) > MAX_POLICY_BYTES:
        raise BadInput([f"{name}:1: policy: longer than {MAX_POLICY_BYTES} characters"])
    parser = YAML(typ="rt", pure=True)
    try:
        return parser.load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        reason = " ".join(str(error.problem or error.context or "malformed").split())
        raise BadInput([f"{name}:{line}: yaml: {reason}"]) from error
    except (YAMLError, ValueError, RecursionError, AttributeError, TypeError, NotImplementedError) as error:
        # The parser answers some malformed texts (odd tags, dates, deep nesting) with plain Python errors.
        raise BadInput([f"{name}:1: yaml: {' '.join(str(error).split()) or type(error).__name__}"]) from error


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
                return kind(node)
        if type(node).__name__ == "ScalarBoolean":
            return bool(node)
        return node


def _line(document: Any, location: Iterable[int | str]) -> int:
    """Line of the innermost key or item of an error's location that the text has; counts from 1."""
    node, line = document, 1
    for part in location:
        marks = getattr(node, "lc", None)
        try:
            if isinstance(node, dict) and part in node and marks is not None:
                line = marks.key(part)[0] + 1
            elif isinstance(node, list) and isinstance(part, int) and part < len(node) and marks is not None:
                line = marks.item(part)[0] + 1
            else:
                continue  # a union's tag, or a key that is missing: the parent's line stands
            node = node[part]
        except (KeyError, TypeError, AttributeError):
            break
    return line


def _field(document: Any, location: tuple[int | str, ...]) -> str:
    """`rules[0].ladder[1].skip_batches`; union tags, which no one wrote, are left out."""
    node, parts = document, ""
    for index, part in enumerate(location):
        if isinstance(part, int):
            parts += f"[{part}]"
        elif isinstance(node, dict) and part not in node and index < len(location) - 1:
            continue
        else:
            parts += f".{part}" if parts else str(part)
        try:
            node = node[part]
        except (KeyError, TypeError, IndexError):
            node = None
    return parts or "policy"


def _reason(issue: Any) -> str:
    message = str(issue["msg"]).removeprefix("Value error, ")
    if issue["type"] == "extra_forbidden":
        message = "unknown key"
    given = issue.get("input")
    if isinstance(given, str | int | float | bool) and issue["type"] not in {"extra_forbidden", "missing"}:
        message += f" (found {given!r})"
    return " ".join(message.split())


def json_schema() -> str:
    """JSON Schema of the policy file, for editors."""
    return json.dumps(Policy.model_json_schema(), indent=2)
