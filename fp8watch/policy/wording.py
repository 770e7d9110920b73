"""Validation errors of a policy in plain words: one line per mistake, with its line and field in the text.

Pydantic says what its types expect; this module says what the file should contain. A misspelt key is one mistake, not
an unknown key and a missing one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fp8watch.policy.schema import meant

Location = tuple[int | str, ...]
Places = Mapping[str, Sequence[str]]
"""Key -> the parts of a policy that have it."""
_LIMITS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_WANTED = {
    "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number",
    "finite_number": "a finite number", "bool_type": "true or false", "string_type": "text",
    "list_type": "a list (items begin with -)", "tuple_type": "a name or a list of names",
    "dict_type": "a mapping (key: value)", "model_type": "a mapping (key: value)",
    "model_attributes_type": "a mapping (key: value)",
}  # fmt: skip


def problems(document: Any, issues: Sequence[Any], places: Places) -> list[tuple[int, str, str]]:
    """(line, field, reason) of each mistake, in the order of the text. `issues`: pydantic's errors."""
    told: list[tuple[int, str, str]] = []
    missing = {issue["loc"]: issue for issue in issues if issue["type"] == "missing"}
    for issue in issues:
        if issue["type"] == "extra_forbidden":
            wanted = _misspelt(issue["loc"], missing)
            told.append((line_of(document, issue["loc"]), field_of(document, issue["loc"]),
                         _unknown(str(issue["loc"][-1]), wanted, places)))  # fmt: skip
            if wanted is not None:
                del missing[wanted]
    for issue in issues:
        if issue["type"] == "extra_forbidden" or (issue["type"] == "missing" and issue["loc"] not in missing):
            continue
        location, reason = issue["loc"], _reason(issue)
        if issue["type"] == "union_tag_not_found" and isinstance(issue.get("input"), dict):
            key = next(iter(difflib.get_close_matches("action", [str(name) for name in issue["input"]], n=1)), None)
            if key is not None:
                location, reason = (*location, key), "unknown key (did you mean action?)"
        told.append((line_of(document, location), field_of(document, location), reason))
    return sorted(told)


def line_of(document: Any, location: Iterable[int | str]) -> int:
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


def field_of(document: Any, location: Location) -> str:
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


def _misspelt(location: Location, missing: Mapping[Location, Any]) -> Location | None:
    """The missing key that an unknown one beside it is nearly spelt like."""
    beside = {str(other[-1]): other for other in missing if other[:-1] == location[:-1]}
    near = difflib.get_close_matches(str(location[-1]), beside, n=1, cutoff=0.6)
    return beside[near[0]] if near else None


def _unknown(key: str, wanted: Location | None, places: Places) -> str:
    if wanted is not None:
        return f"unknown key (did you mean {wanted[-1]}?)"
    if key in places:
        return f"not a key of this; it belongs to {' or '.join(places[key][:3])}"
    return f"unknown key{meant(key, places)}"


def _reason(issue: Any) -> str:
    kind, given, context = issue["type"], issue.get("input"), issue.get("ctx", {})
    if kind == "missing":
        if "approval" in issue["loc"]:
            return "wanted beside the other: how long to wait (timeout_steps) and what silence means (default)"
        return "missing"
    if kind == "union_tag_not_found":
        return "a rung needs an action, such as action: rollback"
    if kind in {"literal_error", "union_tag_invalid"}:
        return _of_choices(kind, given, context)
    limits = [f"{word} {context[name]}" for name, word in _LIMITS.items() if name in context]
    if limits:
        return f"{limits[0]} is wanted, found {_shown(given)}"
    if kind in _WANTED:
        hint = f' (write "{given}")' if kind == "string_type" and isinstance(given, int | float) else ""
        return f"{_WANTED[kind]} is wanted, found {_shown(given)}{hint}"
    if kind == "string_too_short":
        return "empty"
    return " ".join(str(issue["msg"]).removeprefix("Value error, ").split())


def _of_choices(kind: str, given: Any, context: Mapping[str, Any]) -> str:
    if kind == "union_tag_invalid":
        given = given.get("action") if isinstance(given, dict) else given
        known = _names(str(context.get("expected_tags", "")))
        near = meant(given, known) if isinstance(given, str) else ""
        return f"unknown action {_shown(given)}{near}; known: {', '.join(known)}"
    known = _names(str(context.get("expected", "")))
    near = meant(given, known) if isinstance(given, str) and given not in known else ""
    unquoted = " (write it without quotes)" if isinstance(given, str) and given in known else ""
    wanted = " or ".join(filter(None, [", ".join(known[:-1]), known[-1]]))
    return f"{wanted} is wanted, found {_shown(given)}{near}{unquoted}"


def _names(expected: str) -> list[str]:
    """`'a', 'b' or 'c'`, or `1`."""
    return re.findall(r"'([^']+)'", expected) or [expected]


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
