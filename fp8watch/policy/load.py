"""Reading a policy: a file, a shipped policy's name, or the text itself; each error has file, line, field and
reason."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fp8watch.errors import BadInput
from fp8watch.policy import lint, wording, yaml_text
from fp8watch.policy.rungs import Rung
from fp8watch.policy.schema import Policy
from fp8watch.records import DETECTORS

SCHEMA_ID = "urn:fp8watch:policy:1"
"""Contains the file's `version`: a schema that refuses what this one accepts gets another number."""


def shipped() -> list[str]:
    """Names of the policies that come with fp8watch."""
    folder = resources.files("fp8watch.policy") / "policies"
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def load(source: str | Path | None) -> Policy:
    """The policy in a file, of a shipped name, or in a text of several lines; None: `observe`.

    Raises `BadInput` with every problem as `file:line: field: reason`.
    """
    text, name = read(source)
    return parse(text, name)


def read(source: str | Path | None) -> tuple[str, str]:
    """The policy's text and its name for messages. Raises `BadInput` when there is none."""
    if source is None:
        source = "observe"
    if isinstance(source, str):
        if not source.strip():
            raise BadInput([f"<policy>:1: policy: empty; shipped policies: {', '.join(shipped())}"])
        if "\n" in source or ":" in source.split("/")[-1]:
            return source, "<policy>"
        if source in shipped():
            return (resources.files("fp8watch.policy") / "policies" / f"{source}.yaml").read_text("utf-8"), source
    path = Path(source)
    try:
        with path.open("rb") as handle:
            data = handle.read(yaml_text.MAX_POLICY_BYTES + 1)  # one byte more, so that a longer file is refused
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have, such as one with a NUL
        names = ", ".join(shipped())
        reason = getattr(error, "strerror", None) or error
        shown = str(path).replace("\0", "\\0")
        raise BadInput([f"{shown}:1: policy: {reason}; shipped policies: {names}"]) from error
    if len(data) > yaml_text.MAX_POLICY_BYTES:
        raise BadInput([yaml_text.too_long(str(path))])
    try:
        return data.decode("utf-8"), str(path)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise BadInput([f"{path}:{line}: policy: not UTF-8 ({error.reason})"]) from error


def parse(text: str, name: str = "<policy>") -> Policy:
    """The policy in a YAML text. Raises `BadInput`. Does not check whether it can work (`check` does)."""
    return _validated(text, name)[0]


def check(source: str | Path | None) -> Policy:
    """The policy, if it is valid and can work. Raises `BadInput` with everything that is wrong or can never take
    effect."""
    text, name = read(source)
    policy, document = _validated(text, name)
    faults = [(wording.line_of(document, at), wording.field_of(document, at), why) for at, why in lint.faults(policy)]
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
        problems = wording.problems(document, error.errors(include_url=False), PLACES)
        raise BadInput([f"{name}:{line}: {field}: {reason}" for line, field, reason in problems]) from error


def json_schema() -> str:
    """JSON Schema of the policy file, for editors; `policy.schema.json` beside this module has the same content."""
    schema = Policy.model_json_schema()
    for model, detectors in (("When", "detector"), ("Quiet", "still_acts_on")):
        properties = schema["$defs"][model]["properties"]
        properties[detectors]["items"] = {"enum": list(DETECTORS)}
        for field in properties.values():
            _one_or_many(field)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_ID}
    return json.dumps(head | schema, indent=1)


def _one_or_many(field: dict[str, Any]) -> None:
    """Accept `x` as well as `[x]` in conditions, as `_as_tuple` does; pydantic's schema knows the list only."""
    if field.get("type") == "array":
        items = {name: field.pop(name) for name in list(field) if name in {"type", "items", "minItems", "maxItems"}}
        field["anyOf"] = [items["items"], items]
        return
    for option in list(field.get("anyOf", ())):
        if option.get("type") == "array":
            field["anyOf"].insert(0, option["items"])


def _places() -> dict[str, list[str]]:
    """Every key that a policy may have -> the parts that have it; actions by their name."""
    schema = Policy.model_json_schema()
    names = {"Budgets": "budgets", "Approval": "approval", "Quiet": "quiet", "When": "when", "Rule": "a rule",
             "Requires": "requires", "Verify": "verify", "Change": "changes of a rollback"}  # fmt: skip
    found: dict[str, list[str]] = {key: ["the file's top level"] for key in schema["properties"]}
    for model, part in schema["$defs"].items():
        action = part["properties"].get("action", {}).get("const")
        for key in part["properties"]:
            is_common = action is not None and key in Rung.model_fields
            place = "a rung of a ladder" if is_common else names.get(model, f"action {action}")
            places = found.setdefault(key, [])
            if place not in places:
                places.append(place)
    return found


PLACES = _places()
