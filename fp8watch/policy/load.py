"""Reading a policy: a file, a shipped policy's name, or the text itself; every error with file, line, field, reason."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fp8watch.errors import BadInput
from fp8watch.policy import lint, yaml_text
from fp8watch.policy.schema import Policy, meant
from fp8watch.records import DETECTORS

SCHEMA_ID = "urn:fp8watch:policy:1"
"""Carries the file's `version`: a schema that refuses what this one accepts gets another number."""


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
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        names = ", ".join(shipped())
        reason = getattr(error, "strerror", None) or error
        shown = str(path).replace("\0", "\\0")
        raise BadInput([f"{shown}:1: policy: {reason}; shipped policies: {names}"]) from error
    try:
        return data.decode("utf-8"), str(path)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise BadInput([f"{path}:{line}: policy: not UTF-8 ({error.reason})"]) from error


def parse(text: str, name: str = "<policy>") -> Policy:
    """The policy in a YAML text. Raises `BadInput`. Whether it can work is not asked (`check` does)."""
    return _validated(text, name)[0]


def check(source: str | Path | None) -> Policy:
    """The policy, if it is valid and can work. Raises `BadInput` with all that is wrong or can never take effect."""
    text, name = read(source)
    policy, document = _validated(text, name)
    faults = [(_line(document, at), _field(document, at), why) for at, why in lint.faults(policy)]
    if faults:
        raise BadInput([f"{name}:{line}: {field}: {why}" for line, field, why in sorted(faults)])
    return policy


def _validated(text: str, name: str) -> tuple[Policy, Any]:
    document = yaml_text.parse(text, name)
    if not isinstance(document, dict):
        found = "nothing" if document is None else "a list" if isinstance(document, list) else type(document).__name__
        raise BadInput([f"{name}:1: policy: a mapping with version and rules is wanted, found {found}"])
    plain = yaml_text.plain(document, name)
    try:
        return Policy.model_validate(plain), document
    except ValidationError as error:
        problems = [
            (_line(document, issue["loc"]), _field(document, issue["loc"]), _reason(issue))
            for issue in error.errors(include_url=False)
        ]
        raise BadInput([f"{name}:{line}: {field}: {reason}" for line, field, reason in sorted(problems)]) from error


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
        message = "unknown key" + meant(str(issue["loc"][-1]), KEYS)
    if issue["type"] == "missing" and "approval" in issue["loc"]:
        message = "wanted beside the other: how long to wait (timeout_steps) and what silence means (default)"
    given = issue.get("input")
    if isinstance(given, dict) and issue["type"] == "union_tag_invalid":
        given = given.get("action")
    expected = re.findall(r"'(\w+)'", message)
    if isinstance(given, str | int | float | bool) and issue["type"] not in {"extra_forbidden", "missing"}:
        message += f" (found {given!r})"
    if issue["type"] in {"literal_error", "union_tag_invalid"} and isinstance(given, str):
        message += meant(given, [name for name in expected if name != given])
    return " ".join(message.split())


def json_schema() -> str:
    """JSON Schema of the policy file, for editors; the file `policy.schema.json` beside this module holds the same."""
    schema = Policy.model_json_schema()
    for model, detectors in (("When", "detector"), ("Quiet", "still_acts_on")):
        properties = schema["$defs"][model]["properties"]
        properties[detectors]["items"] = {"enum": list(DETECTORS)}
        for field in properties.values():
            _one_or_many(field)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_ID}
    return json.dumps(head | schema, indent=2)


def _one_or_many(field: dict[str, Any]) -> None:
    """`x` and `[x]` mean the same in conditions; pydantic knows the list only."""
    if field.get("type") == "array":
        items = {name: field.pop(name) for name in list(field) if name in {"type", "items", "minItems", "maxItems"}}
        field["anyOf"] = [items["items"], items]
        return
    for option in list(field.get("anyOf", ())):
        if option.get("type") == "array":
            field["anyOf"].insert(0, option["items"])


KEYS = tuple(sorted({*re.findall(r'"(\w+)": \{', json_schema())}))
"""Every key that a policy may have, for the nearest one to a key that is unknown."""
