"""Numbers of any size stay integers: Helm reads them as floats, and prints those from a million on as 1e+06."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from rendered_chart import CASES, CHART, chart, pods, render

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
FLOAT = re.compile(r"(?<![\w.])\d+(\.\d+)?e\+\d+|(?<![\w.])\d{5,}\.0(?![\w.])")


def integers(node: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """Every integer that the schema knows, with the largest that it allows."""
    for name, child in node.get("properties", {}).items():
        if child.get("type") == "integer":
            yield (*path, name), child.get("maximum", 1_234_567_000)
        yield from integers(child, (*path, name))


def with_largest(values: dict[str, Any]) -> dict[str, Any]:
    """The values, with every integer as large as it may be."""
    changed = json.loads(json.dumps(values))
    for path, largest in integers(SCHEMA):
        place = changed
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = largest
    return changed


def test_the_schema_has_numbers_of_over_a_million() -> None:
    assert sum(largest > 1_000_000 for _, largest in integers(SCHEMA)) >= 5, "or the next test tests nothing"


def test_no_number_is_printed_as_a_float() -> None:
    for case, values in CASES.items():
        for path, text in chart.render(with_largest(values), name="r", namespace="ns").items():
            if "dashboard" not in path and "prometheusrule" not in path:
                assert not FLOAT.search(text), f"{case}: {path}: {FLOAT.search(text)}"


def test_large_ids_budgets_and_what_is_passed_through_are_as_given() -> None:
    ids = {"runAsUser": 1_234_567, "runAsGroup": 1_000_680_000}
    tolerations = [{"key": "k", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 3_000_000}]
    agent = ids | {"metrics": {"seriesBudget": 1_500_000}, "tolerations": tolerations}
    agent["resources"] = {"limits": {"memory": 1_500_000_000}, "requests": {"memory": 1_000_000}}
    values = {**CASES["everything"], "agent": agent | {"metrics": agent["metrics"] | {"scope": "pod"}}}
    values["console"] = CASES["everything"]["console"] | ids
    found = pods(render(values))
    for suffix in ("agent", "console"):
        security = found[f"r-fp8watch-{suffix}"]["spec"]["securityContext"]
        assert {name: security[name] for name in ids} == ids
        assert all(type(security[name]) is int for name in ids), "a float is equal, and Kubernetes refuses it"
        assert security["runAsNonRoot"] is True
    spec = found["r-fp8watch-agent"]["spec"]
    arguments = spec["containers"][0]["args"]
    assert arguments[arguments.index("--series-budget") + 1] == "1500000"
    assert [type(item["tolerationSeconds"]) for item in spec["tolerations"]] == [int]
    resources = spec["containers"][0]["resources"]
    amounts = [resources["limits"]["memory"], resources["requests"]["memory"]]
    assert [repr(amount) for amount in amounts] == ["1500000000", "1000000"]
