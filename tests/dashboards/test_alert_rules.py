"""The alert rules: promtool's unit tests, and that each alert's tests fail when its expression never is true."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import promql_parser
import pytest
import yaml

from fp8watch.metrics import BY_NAME
from fp8watch_dashboards import rules

FOLDER = rules.FILE.parent
ROOT = FOLDER.parents[1]
GROUPS = {group["name"]: group for group in yaml.safe_load(rules.text())["groups"]}
RULES = [
    pytest.param(name, index, id=rule.get("alert") or rule["record"])
    for name, group in GROUPS.items()
    for index, rule in enumerate(group["rules"])
]
ALERTS = {rule["alert"]: rule for group in GROUPS.values() for rule in group["rules"] if "alert" in rule}
RECORDED = {rule["record"] for group in GROUPS.values() for rule in group["rules"] if "record" in rule}
UNIT_TESTS = sorted((FOLDER / "tests").glob("*.yaml"))
TESTED_IN = {"runs": ("runs", "lost", "vanished", "held"), "totals": ("totals", "held")}
"""Part of a group's name after the dot -> its unit test files, where it is not one of the same name."""
NEVER = "vector(0) > 1"
LOOKED_AT = r"fp8watch_(loss|grad_norm|update_rms|loss_max|tensor_\w+)"


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)


def selectors(node) -> list[promql_parser.VectorSelector]:
    if isinstance(node, promql_parser.VectorSelector):
        return [node]
    if isinstance(node, promql_parser.MatrixSelector):
        return [node.vector_selector]
    if isinstance(node, promql_parser.Call):
        return [found for argument in node.args for found in selectors(argument)]
    if isinstance(node, promql_parser.BinaryExpr):
        return [*selectors(node.lhs), *selectors(node.rhs)]
    return selectors(node.expr) if hasattr(node, "expr") else []


@pytest.mark.prometheus
def test_promtool_takes_the_rules_and_the_example_of_a_scrape_config() -> None:
    assert promtool("check", "rules", rules.FILE).returncode == 0
    checked = promtool("check", "config", ROOT / "dashboards" / "prometheus" / "prometheus.yml")
    assert checked.returncode == 0, checked.stderr
    assert "1 rule files found" in checked.stdout


@pytest.mark.alertmanager
@pytest.mark.parametrize(("severity", "receiver"), [("critical", "fp8watch-now"), ("warning", "fp8watch-day")])
def test_the_example_of_routes_tells_who_has_to_know(severity: str, receiver: str) -> None:
    file = ROOT / "dashboards" / "prometheus" / "alertmanager.yml"
    assert severity in {rule["labels"]["severity"] for rule in ALERTS.values()}
    route = ["amtool", "config", "routes", "test", f"--config.file={file}", f"severity={severity}", "run=r"]
    told = subprocess.run(route, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert told.stdout.strip() == receiver


def test_what_is_held_back_and_by_what_are_alerts() -> None:
    inhibited = yaml.safe_load((ROOT / "dashboards" / "prometheus" / "alertmanager.yml").read_text())["inhibit_rules"]
    assert inhibited
    for rule in inhibited:
        for (matcher,) in (rule["source_matchers"], rule["target_matchers"]):
            assert re.fullmatch(r'alertname="(\w+)"', matcher)[1] in ALERTS


# case: PRM-11
# case: DSH-04
# case: DSH-07
@pytest.mark.prometheus
@pytest.mark.parametrize("path", UNIT_TESTS, ids=lambda path: path.stem)
def test_the_unit_tests_of_the_rules_pass(path: Path) -> None:
    done = promtool("test", "rules", path)
    assert done.returncode == 0, done.stderr


@pytest.mark.prometheus
@pytest.mark.parametrize(("group", "index"), RULES)
def test_an_alert_that_never_fires_is_found_out(tmp_path: Path, group: str, index: int) -> None:
    chosen = [{**rule, "expr": NEVER} if i == index else rule for i, rule in enumerate(GROUPS[group]["rules"])]
    mutated = tmp_path / "fp8watch.yaml"
    mutated.write_text(yaml.safe_dump({"groups": [{**GROUPS[group], "rules": chosen}]}))
    called = GROUPS[group]["rules"][index].get("alert") or GROUPS[group]["rules"][index]["record"]
    part = group.rpartition(".")[2]
    for name in TESTED_IN.get(part, (part,)):
        units = yaml.safe_load((FOLDER / "tests" / f"{name}.yaml").read_text())
        assert units["rule_files"] == ["../fp8watch.yaml"]
        # The first test that asks for it; for a recorded series that only other rules read, all: each takes a while.
        tests = [unit for unit in units["tests"] if called in str(unit["promql_expr_test"])][:1] or units["tests"]
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump({**units, "rule_files": ["fp8watch.yaml"], "tests": tests}))
        done = promtool("test", "rules", file)
        if done.returncode != 0:
            assert " got: " in done.stderr, done.stderr
            return
    raise AssertionError("the unit tests do not miss it")


@pytest.mark.parametrize(("group", "index"), RULES)
def test_rules_know_the_catalogue_and_leave_values_alone(group: str, index: int) -> None:
    found = selectors(promql_parser.parse(GROUPS[group]["rules"][index]["expr"]))
    assert found
    for selector in found:
        if selector.name in RECORDED or selector.name == "up":
            continue
        assert not re.fullmatch(LOOKED_AT, selector.name)  # case: PRM-11
        metric = BY_NAME[selector.name]
        assert {matcher.name for matcher in selector.matchers.matchers} <= set(metric.labels)


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_says_what_it_is_and_what_to_do(alert: str) -> None:
    rule = ALERTS[alert]
    assert re.fullmatch(r"Fp8watch([A-Z][a-z]+)+", alert)
    assert rule["labels"] == {"severity": rule["labels"]["severity"]}
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    runbook = ROOT / rule["annotations"]["runbook_url"]
    assert runbook.name == f"{alert}.md"
    assert runbook.read_text().startswith(f"# {alert}\n")
    page = (ROOT / "docs" / "alerts.md").read_text()
    assert re.search(
        rf"^\| \[{alert}\]\(\.\./dashboards/runbooks/{alert}\.md\) \| {rule['labels']['severity']} \|", page, re.M
    )


def test_there_is_no_page_about_an_alert_that_is_none() -> None:
    assert {path.stem for path in (ROOT / "dashboards" / "runbooks").glob("*.md")} == set(ALERTS)
    assert set(re.findall(r"^\| \[(\w+)\]", (ROOT / "docs" / "alerts.md").read_text(), re.M)) == set(ALERTS)


def test_the_charts_copy_is_current() -> None:
    assert rules.CHART_COPY.read_text(encoding="utf-8") == rules.text(), "run: python -m fp8watch_dashboards.rules"
