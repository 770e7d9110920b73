"""Building blocks of the Grafana dashboard: queries over the metric catalogue, and panels with common defaults.

Every query aggregates over instances, so that a restarted agent does not draw a second line. Counters are queried only
through `rate` or `increase`.
"""

from __future__ import annotations

from fp8watch.metrics import BY_NAME
from fp8watch_dashboards.grafana_sdk import (
    common,
    common_models,
    dashboard,
    heatmap,
    models,
    prometheus,
    prometheus_models,
    stat,
    timeseries,
)

DATASOURCE = common_models.DataSourceRef(type_val="prometheus", uid="${datasource}")
INTERVAL = "$__rate_interval"
GREEN, AMBER, RED = "green", "orange", "red"


def select(name: str, matchers: str = "") -> str:
    """The series of one metric for the chosen job and run. Raises `KeyError` for a name not in the catalogue."""
    base = name.removesuffix("_bucket")
    if base != name and BY_NAME[base].kind != "histogram":
        raise KeyError(name)
    assert BY_NAME[base]
    return f'{name}{{job=~"$job", run="$run"{", " + matchers if matchers else ""}}}'


def increase(name: str, by: str, interval: str = INTERVAL) -> str:
    """How much a counter grew, summed over instances; no value where it did not grow."""
    return f"sum by ({by}) (increase({select(name)}[{interval}])) > 0"


def ratio(numerator: str, denominator: str, by: str) -> str:
    """Ratio of two element counters over the sampled steps; no value where none were sampled."""
    top, bottom = (f"sum by ({by}) (rate({select(name)}[{INTERVAL}]))" for name in (numerator, denominator))
    return f"{top} / ({bottom} > 0)"


def query(expr: str, legend: str = "", *, is_instant: bool = False) -> prometheus.Dataquery:
    """A query over the shown range, or only for its end."""
    target = prometheus.Dataquery().expr(expr).legend_format(legend).datasource(DATASOURCE)
    return target.instant() if is_instant else target.range()


def thresholds(*steps: tuple[float | None, str]) -> dashboard.ThresholdsConfig:
    """Pairs of (lower bound, colour) in ascending order; the first bound is None."""
    return (
        dashboard.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps([models.Threshold(value=value, color=color) for value, color in steps])
    )


def tile(title: str, description: str, expr: str, *, unit: str = "short", legend: str = "") -> stat.Panel:
    """The current value as a number. An instant query, because a range query would also show states that are over."""
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .with_target(query(expr, legend, is_instant=True))
        .unit(unit)
        .span(4)
        .height(4)
        .color_mode(common_models.BigValueColorMode.VALUE)
        .graph_mode(common_models.BigValueGraphMode.NONE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(thresholds((None, "text")))
    )


def graph(
    title: str, description: str, *targets: tuple[str, str], unit: str = "short", span: int = 12
) -> timeseries.Panel:
    """Lines over time. `targets`: (expression, legend)."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .span(span)
        .height(8)
        .line_width(1)
        .fill_opacity(0)
        .show_points(common_models.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_models.TooltipDisplayMode.MULTI)
            .sort(common_models.SortOrder.DESCENDING)
        )
    )
    for expr, legend in targets:
        panel = panel.with_target(query(expr, legend))
    return panel


def events(title: str, description: str, expr: str, legend: str, *, span: int = 12) -> timeseries.Panel:
    """Stacked bars of the events in each interval."""
    return (
        graph(title, description, (expr, legend), span=span)
        .draw_style(common_models.GraphDrawStyle.BARS)
        .fill_opacity(70)
        .decimals(0)
        .min(0)
        .stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    )


def distribution(title: str, description: str, expr: str, *, unit: str, span: int = 12) -> heatmap.Panel:
    """A histogram over time, from its buckets."""
    return (
        heatmap.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .span(span)
        .height(8)
        .unit(unit)
        .calculate(False)
        .with_target(query(expr, "{{le}}").format(prometheus_models.PromQueryFormat.HEATMAP))
    )
