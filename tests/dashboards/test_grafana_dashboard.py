"""The Grafana dashboard: the file is what the code builds, and it keeps the rules of Grafana's dashboard linter."""

from __future__ import annotations

import json
import re

import promql_parser
import pytest

from fp8watch.metrics import BY_NAME
from fp8watch_dashboards import grafana
from fp8watch_dashboards.grafana_panels import select
from fp8watch_dashboards.grafana_sdk import JSONEncoder, models, register_default_plugins

BOARD = json.loads(grafana.text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
TARGETS = [
    pytest.param(panel, target, id=f"{panel['id']}-{target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]
VARIABLES = {variable["name"]: variable for variable in BOARD["templating"]["list"]}


def plain(expr: str) -> str:
    return expr.replace("$__rate_interval", "5m").replace("$__range", "1h")


def selectors(expr: str) -> dict[str, list[str]]:
    """Metric name -> the functions and aggregations it stands in, innermost first."""
    found: dict[str, list[str]] = {}

    def visit(node, around: tuple[str, ...]) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found[node.name] = list(reversed(around))
        elif isinstance(node, promql_parser.MatrixSelector):
            visit(node.vector_selector, around)
        elif isinstance(node, promql_parser.Call):
            for argument in node.args:
                visit(argument, (*around, node.func.name))
        elif isinstance(node, promql_parser.AggregateExpr):
            visit(node.expr, (*around, str(node.op)))
        elif isinstance(node, promql_parser.BinaryExpr):
            visit(node.lhs, around)
            visit(node.rhs, around)
        elif isinstance(node, promql_parser.ParenExpr | promql_parser.UnaryExpr):
            visit(node.expr, around)

    visit(promql_parser.parse(plain(expr)), ())
    return found


def test_the_committed_file_is_current():
    for file in (grafana.FILE, grafana.CHART_COPY):
        assert file.read_text(encoding="utf-8") == grafana.text(), "run: python -m fp8watch_dashboards.grafana"


def test_the_file_survives_a_round_trip_through_the_schema():
    """The SDK drops keys it does not know and refuses wrong types, so equality is strictness."""
    register_default_plugins()
    again = JSONEncoder(sort_keys=True, indent=1).encode(models.Dashboard.from_json(BOARD)) + "\n"
    assert again == grafana.text()


def test_panels_have_numbers_of_their_own_and_do_not_overlap():
    identities = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(identities)) == len(identities)
    assert 0 not in identities
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


# case: DSH-05
def test_template_datasource_and_panel_datasource_rules():
    assert VARIABLES["datasource"]["type"] == "datasource"
    assert VARIABLES["datasource"]["query"] == "prometheus"
    assert "${DS_" not in grafana.text()
    assert "__inputs" not in BOARD
    assert BOARD.get("id") is None
    for owner in [*PANELS, *(t for p in PANELS for t in p["targets"]), VARIABLES["job"], VARIABLES["run"]]:
        assert owner["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_template_rules():
    assert VARIABLES["job"]["multi"] is True
    assert VARIABLES["job"]["allValue"] == ".+"
    for name in ("job", "run"):
        assert VARIABLES[name]["refresh"] == 2, "template-on-time-change-reload"
        assert VARIABLES[name]["query"].startswith("label_values(fp8watch_step")


def test_uneditable_dashboard_rule():
    assert BOARD["editable"] is False


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_panel_rules(panel):
    assert panel["title"]
    assert len(panel["description"]) > 20
    assert panel["targets"], "panel-no-targets"
    assert panel["fieldConfig"]["defaults"]["unit"], "panel-units"
    references = [target["refId"] for target in panel["targets"]]
    assert len(set(references)) == len(references)


@pytest.mark.parametrize(("panel", "target"), TARGETS)
def test_target_rules(panel, target):
    expr = target["expr"]
    used = selectors(expr)
    assert used
    for name, around in used.items():
        metric = BY_NAME.get(name) or BY_NAME[name.removesuffix("_bucket")]
        if metric.kind == "gauge":
            assert "rate" not in around
        else:
            assert around[0] in ("rate", "increase"), "target-counter-agg"
        # case: DSH-03
        assert {"sum", "max", "min"} & set(around), f"{name} is not aggregated over instances"
    assert 'job=~"$job"' in expr
    assert 'run="$run"' in expr
    for interval in re.findall(r"\[([^\]]+)\]", expr):
        assert interval == "$__rate_interval", "target-rate-interval"


@pytest.mark.parametrize(("panel", "target"), TARGETS)
def test_labels_that_queries_group_by_exist(panel, target):
    labels = {label for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in group.split(", ")}
    for name in selectors(target["expr"]):
        metric = BY_NAME.get(name) or BY_NAME[name.removesuffix("_bucket")]
        assert labels <= {*metric.labels, "le"}, name
    assert set(re.findall(r"{{(\w+)}}", target.get("legendFormat", ""))) <= labels


def test_annotations_parse_and_use_the_catalogue():
    (annotation,) = BOARD["annotations"]["list"]
    assert selectors(annotation["expr"]).keys() <= BY_NAME.keys()


def test_what_is_not_in_the_catalogue_cannot_be_built_upon():
    with pytest.raises(KeyError):
        select("fp8watch_nonsense")
    with pytest.raises(KeyError):
        select("fp8watch_loss_bucket")


def test_the_dashboard_covers_what_an_operator_asks_for():
    shown = {name for panel in PANELS for target in panel["targets"] for name in selectors(target["expr"])}
    assert {
        "fp8watch_run_state", "fp8watch_step", "fp8watch_loss", "fp8watch_bf16_modules", "fp8watch_observed_modules",
        "fp8watch_overhead_ratio", "fp8watch_grad_norm", "fp8watch_learning_rate", "fp8watch_clip_limit",
        "fp8watch_tensor_headroom_log2_min_60s", "fp8watch_saturated_elements_total",
        "fp8watch_underflowed_elements_total", "fp8watch_nonfinite_total", "fp8watch_findings_total",
        "fp8watch_actions_total", "fp8watch_frames_dropped_total",
    } <= shown  # fmt: skip
