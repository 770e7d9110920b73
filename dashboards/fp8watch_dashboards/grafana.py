"""The Grafana dashboard of a run, as code: `python -m fp8watch_dashboards.grafana` writes `fp8watch.json`.

It uses schema v1 ("classic" JSON), which file provisioning, the dashboard sidecar and the import dialog of Grafana 10
to 13 all accept. The data source is a variable, so that one file works for all three.
"""

from __future__ import annotations

import sys
from pathlib import Path
from string import ascii_uppercase

from fp8watch_dashboards.grafana_panels import (
    AMBER,
    DATASOURCE,
    GREEN,
    RED,
    distribution,
    events,
    graph,
    increase,
    query,
    ratio,
    select,
    thresholds,
    tile,
)
from fp8watch_dashboards.grafana_sdk import JSONEncoder, common, common_models, dashboard, models

UID = "fp8watch-run"
APPLIED = 'outcome="pending"'
"""Every action counts as pending once: when it is applied."""
FILE = Path(__file__).resolve().parents[1] / "grafana" / "fp8watch.json"
CHART_COPY = FILE.parents[2] / "helm" / "fp8watch" / "files" / FILE.name
"""The chart's copy: a chart can only use files in its own folder."""


def build() -> models.Dashboard:
    """The dashboard. All panels and rows are numbered."""
    board = (
        dashboard.Dashboard("fp8watch run")
        .uid(UID)
        .description("Health of one FP8 training run: loss, head-room of the scales, findings and actions.")
        .tags(["fp8watch", "fp8", "training"])
        .readonly()
        .time("now-1h", "now")
        .timezone("browser")
        .refresh("10s")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("job")
            .label("Job")
            .query("label_values(fp8watch_step, job)")
            .datasource(DATASOURCE)
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(models.VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".+")
            .current(models.VariableOption(text="All", value="$__all"))
        )
        .with_variable(
            dashboard.QueryVariable("run")
            .label("Run")
            .query('label_values(fp8watch_step{job=~"$job"}, run)')
            .datasource(DATASOURCE)
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(models.VariableSort.ALPHABETICAL_DESC)
        )
    )
    board.annotation(
        dashboard.AnnotationQuery()
        .name("Actions applied")
        .datasource(DATASOURCE)
        .enable(True)
        .icon_color("purple")
        .expr(f"sum by (action) (increase({select('fp8watch_actions_total', APPLIED)}[1m])) > 0")
        .step("30s")
        .title_format("{{action}}")
    )
    for add in (_now, _training, _scales, _incidents):
        add(board)
    built = board.build()
    for number, panel in enumerate(built.panels or [], start=1):
        panel.id_val = number
        for letter, target in zip(ascii_uppercase, getattr(panel, "targets", None) or [], strict=False):
            target.ref_id = letter
    return built


def text() -> str:
    """The content of the dashboard file."""
    return JSONEncoder(sort_keys=True, indent=1).encode(build()) + "\n"


def main() -> None:
    """Write the file and the chart's copy, and print their paths."""
    for file in (FILE, CHART_COPY):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text(), encoding="utf-8")
        sys.stdout.write(f"{file}\n")


def _row(title: str) -> dashboard.Row:
    return dashboard.Row(title)


def _now(board: dashboard.Dashboard) -> None:
    board.with_row(_row("Now"))
    board.with_panel(
        tile(
            "State",
            "What the run is doing: running, ended, lost (its process went silent) or halted by policy.",
            f"max by (state) ({select('fp8watch_run_state')}) == 1",
            legend="{{state}}",
        ).text_mode(common_models.BigValueTextMode.NAME)
    )
    board.with_panel(
        tile(
            "Step", "Optimizer steps done. Goes back at a rollback.", f"max by (run) ({select('fp8watch_step')})"
        ).decimals(0)
    )
    board.with_panel(
        tile(
            "Loss",
            "Training loss of the last step that was finite.",
            f"max by (run) ({select('fp8watch_loss')})",
        ).decimals(4)
    )
    board.with_panel(
        tile(
            "BF16 modules",
            "FP8 modules that currently run in BF16, because of an action or by choice.",
            f"max by (run) ({select('fp8watch_bf16_modules')})",
        ).thresholds(thresholds((None, GREEN), (1, AMBER)))
    )
    board.with_panel(
        tile(
            "Modules seen",
            "Share of the run's FP8 modules whose scales are observed; faults in the others go unseen.",
            f"max by (run) ({select('fp8watch_observed_modules')})"
            f" / (max by (run) ({select('fp8watch_expected_modules')}) > 0)",
            unit="percentunit",
        ).thresholds(thresholds((None, RED), (0.999, GREEN)))
    )
    board.with_panel(
        tile(
            "Overhead",
            "Share of a step spent inside fp8watch on the training thread.",
            f"max by (run) ({select('fp8watch_overhead_ratio')})",
            unit="percentunit",
        )
        .decimals(2)
        .thresholds(thresholds((None, GREEN), (0.02, AMBER), (0.1, RED)))
    )


def _training(board: dashboard.Dashboard) -> None:
    board.with_row(_row("Training"))
    board.with_panel(
        graph(
            "Loss",
            "Mean over ranks; if a step was not finite, the last finite value (see Non-finite values).",
            (f"max by (run) ({select('fp8watch_loss')})", "loss"),
            span=8,
        )
    )
    board.with_panel(
        graph(
            "Gradient norm and clip limit",
            "Global gradient norm before clipping, and the clip limit in force, actions included.",
            (f"max by (run) ({select('fp8watch_grad_norm')})", "gradient norm"),
            (f"max by (run) ({select('fp8watch_clip_limit')})", "clip limit"),
            span=8,
        ).scale_distribution(common.ScaleDistributionConfig().type(common_models.ScaleDistribution.LOG).log(10))
    )
    board.with_panel(
        graph(
            "Learning rate",
            "Learning rate in force, actions included.",
            (f"max by (run) ({select('fp8watch_learning_rate')})", "learning rate"),
            unit="sci",
            span=8,
        )
    )


def _scales(board: dashboard.Dashboard) -> None:
    headroom = select("fp8watch_tensor_headroom_log2_min_60s")
    quantized = "fp8watch_quantized_elements_total"
    board.with_row(_row("FP8 scales"))
    board.with_panel(
        graph(
            "Least head-room by tensor class",
            "Minimum over the last minute of log2(fp8_max / (amax * scale)): below 0 a tensor clipped; "
            "far above, range is wasted and small values underflow.",
            (f"min by (tensor) ({headroom})", "{{tensor}}"),
        )
        .decimals(2)
        .thresholds(thresholds((None, RED), (0, GREEN)))
        .thresholds_style(common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.LINE))
    )
    board.with_panel(
        graph(
            "Least head-room by block: the ten worst",
            "Minimum over the last minute, by transformer block and tensor class.",
            (f"bottomk(10, min by (block, tensor) ({headroom}))", "block {{block}} {{tensor}}"),
        ).decimals(2)
    )
    board.with_panel(
        graph(
            "Saturated elements",
            "Share of elements clipped to the format's maximum, over the sampled steps.",
            (ratio("fp8watch_saturated_elements_total", quantized, "tensor"), "{{tensor}}"),
            unit="percentunit",
        ).min(0)
    )
    board.with_panel(
        graph(
            "Underflowed elements",
            "Share of non-zero elements that became zero, over the sampled steps.",
            (ratio("fp8watch_underflowed_elements_total", quantized, "tensor"), "{{tensor}}"),
            unit="percentunit",
        ).min(0)
    )
    board.with_panel(
        events(
            "Steps that clipped, by block",
            "Steps in which amax * scale exceeded the format's maximum: exact, from every step.",
            increase("fp8watch_tensor_clipped_steps_total", "block, tensor"),
            "block {{block}} {{tensor}}",
        )
    )
    board.with_panel(
        distribution(
            "Head-room of all tensors",
            "Number of tensors and steps in each range of head-room.",
            f"sum by (le) (increase({select('fp8watch_headroom_log2_bucket')}[$__rate_interval]))",
            unit="short",
        )
    )


def _incidents(board: dashboard.Dashboard) -> None:
    board.with_row(_row("Findings and actions"))
    board.with_panel(
        events(
            "Findings",
            "What the detectors reported, with the cause that the evidence supports.",
            increase("fp8watch_findings_total", "detector, cause, severity"),
            "{{detector}} ({{cause}}, {{severity}})",
        )
    )
    board.with_panel(
        events(
            "Actions",
            "Actions and their outcomes; every action counts as pending when it is applied.",
            increase("fp8watch_actions_total", "action, outcome"),
            "{{action}}: {{outcome}}",
        )
    )
    board.with_panel(
        events(
            "Non-finite values",
            "Number of NaN and infinite values, by quantity.",
            increase("fp8watch_nonfinite_total", "quantity"),
            "{{quantity}}",
            span=8,
        )
    )
    board.with_panel(
        events(
            "Clipped and skipped steps",
            "Steps whose gradient was clipped, and optimizer steps skipped because it was not finite.",
            increase("fp8watch_clipped_steps_total", "run"),
            "clipped",
            span=8,
        ).with_target(query(increase("fp8watch_skipped_steps_total", "run"), "skipped"))
    )
    board.with_panel(
        events(
            "Lost on the way",
            "Dropped frames by reason, failed writes to the store, and series omitted to keep the series budget.",
            increase("fp8watch_frames_dropped_total", "reason"),
            "frames: {{reason}}",
            span=8,
        )
        .with_target(query(increase("fp8watch_store_errors_total", "run"), "store errors"))
        .with_target(query(increase("fp8watch_agent_series_dropped_total", "run"), "series left out"))
    )


if __name__ == "__main__":
    main()
