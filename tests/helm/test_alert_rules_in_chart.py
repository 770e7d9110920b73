"""The chart's PrometheusRule: the rules of the repository and nothing else, where an operator finds them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml
from rendered_chart import chart

from fp8watch_dashboards import rules


def rule_object(**values: Any) -> dict[str, Any] | None:
    texts = chart.render({"prometheusRule": values}, name="r", namespace="ns")
    documents = yaml.safe_load_all(texts.get("fp8watch/templates/prometheusrule.yaml", ""))
    found = [document for document in documents if document]
    assert len(found) <= 1
    return found[0] if found else None


def test_it_is_optional() -> None:
    assert rule_object() is None
    assert rule_object(enabled=False) is None


def test_it_holds_the_rules_of_the_repository_as_they_are(tmp_path: Path) -> None:
    found = rule_object(enabled=True)
    assert found is not None
    assert (found["apiVersion"], found["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert found["metadata"]["name"] == "r-fp8watch"
    assert found["metadata"]["namespace"] == "ns"
    assert found["spec"] == yaml.safe_load(rules.text())
    summaries = [rule["annotations"]["summary"] for group in found["spec"]["groups"] for rule in group["rules"]
                 if "alert" in rule]  # fmt: skip
    assert any("{{ $labels.run }}" in summary for summary in summaries), "Helm has eaten Prometheus' templates"


@pytest.mark.prometheus
def test_prometheus_takes_what_is_rendered(tmp_path: Path) -> None:
    found = rule_object(enabled=True, runbookUrlPrefix="https://git.example.com/main/")
    assert found is not None
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(found["spec"]))
    done = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_labels_namespace_and_links_are_values() -> None:
    found = rule_object(
        enabled=True, namespace="monitoring", additionalLabels={"release": "kube-prometheus-stack"},
        runbookUrlPrefix="https://git.example.com/main/",
    )  # fmt: skip
    assert found is not None
    assert found["metadata"]["namespace"] == "monitoring"
    assert found["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    links = [
        rule["annotations"]["runbook_url"]
        for group in found["spec"]["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert links
    assert all(link.startswith("https://git.example.com/main/dashboards/runbooks/Fp8watch") for link in links)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"runbookUrlPrefix": "git.example.com"}, "/prometheusRule/runbookUrlPrefix"),
        ({"interval": "15s"}, "interval"),
        ({"additionalLabels": {"release": 1}}, "/prometheusRule/additionalLabels/release"),
    ],
)
def test_a_bad_value_is_refused_by_name(values: dict[str, Any], key: str) -> None:
    with pytest.raises(helm_python.HelmValuesError, match=key):
        chart.validate_schema({"prometheusRule": values})
