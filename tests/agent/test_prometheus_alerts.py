"""The shipped rules over a live agent: they fire on what happened, none errs, and a crash does not end them.

The tests run in this order: each takes the run a step further, to its end.
"""

from __future__ import annotations

import math
import os
import signal

import hand_made as make
import pytest
import yaml
from scraped import BLOCKS, DASHBOARDS, HONOURS, NUM_STEPS, POD, RUNBOOKS, SATURATED, ScrapedRun

from fp8watch.settings import Settings
from fp8watch.transport import Channel, endpoint

pytestmark = pytest.mark.prometheus


@pytest.fixture(scope="module")
def run(scraped_run: ScrapedRun) -> ScrapedRun:
    return scraped_run


def test_alerts_fire_on_the_flag_and_no_rule_errs(run: ScrapedRun) -> None:  # case: PRM-11
    for alert, quantity, severity in (
        ("Fp8watchNonFiniteLoss", "loss", "critical"), ("Fp8watchNonFiniteGradient", "grad_norm", "warning"),
    ):  # fmt: skip
        labels = {"run": "r", "quantity": quantity, "severity": severity}
        make.wait_for(lambda alert=alert, labels=labels: run.prometheus.is_firing(alert, **labels), what=alert)
    assert not run.prometheus.is_firing("Fp8watchNonFiniteLoss", quantity="parameter")
    seen = run.prometheus.query(
        'max_over_time(run_detector_cause:fp8watch_open_act_finding:last_seen_timestamp_seconds{run="r",'
        'detector="nonfinite"}[1m]) > 0'
    )
    assert seen, "the finding was open for a second or more"
    rules = [rule for group in run.prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) > 20
    evaluated = [rule for rule in rules if rule["health"] != "unknown"]  # totals: every five minutes
    assert len(evaluated) >= len(rules) - 3
    assert {rule["health"] for rule in evaluated} == {"ok"}
    active = [alert for rule in rules for alert in rule.get("alerts", [])]
    assert any("NaN or infinite" in alert["annotations"]["summary"] for alert in active)
    texts = [text for alert in active for text in alert["annotations"].values()]
    assert not [text for text in texts if "no value" in text or "error expanding" in text]


@pytest.mark.alertmanager
def test_an_alert_reaches_whoever_has_to_look_now(run: ScrapedRun) -> None:
    """Agent, Prometheus, Alertmanager, webhook: what a person's pager gets."""
    assert run.alerts is not None
    told = run.alerts.receiver
    receiver, alert = make.wait_for(lambda: told.alerts("firing", alertname="Fp8watchNonFiniteLoss"))[0]
    assert receiver == "fp8watch-now"
    assert alert["labels"] == {
        "alertname": "Fp8watchNonFiniteLoss", "severity": "critical", "run": "r", "quantity": "loss"
    }  # fmt: skip
    assert alert["annotations"]["summary"] == "Run r: loss is NaN or infinite"
    assert "had steps whose loss was not finite" in alert["annotations"]["description"]
    assert alert["annotations"]["runbook_url"] == f"{RUNBOOKS}dashboards/runbooks/Fp8watchNonFiniteLoss.md"
    (message,) = [body for _, body in told.messages if alert in body["alerts"]][:1]
    assert message["groupLabels"] == {"alertname": "Fp8watchNonFiniteLoss", "run": "r"}


@pytest.mark.alertmanager
def test_one_fault_is_not_told_twice(run: ScrapedRun) -> None:
    assert run.alerts is not None
    (held,) = make.wait_for(
        lambda: [
            alert
            for alert in run.alerts.alerts()
            if alert["labels"]["alertname"] == "Fp8watchNonFiniteGradient" and alert["status"]["state"] == "suppressed"
        ]
    )
    assert len(held["status"]["inhibitedBy"]) == 1
    assert not [alert for alert in run.alerts.alerts() if alert["status"]["silencedBy"]]


def test_run_and_rank_are_the_runs_whatever_the_target_is_called(run: ScrapedRun) -> None:  # case: DSH-01
    for job in HONOURS:
        (found,) = make.wait_for(
            lambda job=job: run.prometheus.vector(
                f'count by (run, rank, pod, namespace) (fp8watch_rank_info{{job="{job}"}})'
            )
        )
        assert found["metric"] == {"run": "r", "rank": "0", **POD}
    shown = run.prometheus.vector("count by (run, rank) (fp8watch_rank_info)")
    assert [item["metric"] for item in shown] == [{"run": "r", "rank": "0"}]
    assert run.prometheus.query('{__name__=~"fp8watch_.+", exported_run=~".+"}') == []
    assert run.prometheus.query('{__name__=~"fp8watch_.+", exported_rank=~".+"}') == []


def test_totals_outlast_a_new_agent(run: ScrapedRun) -> None:  # case: DSH-04
    groups = yaml.safe_load((DASHBOARDS / "rules" / "fp8watch.yaml").read_text())["groups"]
    (query,) = [
        rule["expr"] for group in groups for rule in group["rules"]
        if rule.get("record") == "run_tensor:fp8watch_saturated_elements:increase1d"
    ]  # fmt: skip

    counters = 'fp8watch_saturated_elements_total{tensor="input"}'
    before = SATURATED * BLOCKS * NUM_STEPS

    def total() -> float:
        by_tensor = {item["metric"]["tensor"]: float(item["value"][1]) for item in run.prometheus.vector(query)}
        return by_tensor.get("input", 0.0)

    def shown() -> dict[str, float]:
        """Instance -> its counters, as they stand now; after one more step."""
        run.step({"loss": 2.0, "grad_norm": 0.5})
        return {
            item["metric"]["instance"]: float(item["value"][1])
            for item in run.prometheus.vector(f"sum by (instance) ({counters})")
        }

    (old,) = shown()
    run.replace_agent()
    make.wait_for(lambda: shown().keys() - {old}, 30, "the new agent, which counts from 0 at another address")
    make.wait_for(lambda: old not in shown())
    (since,) = shown().values()
    # Extrapolation by half a scrape interval weighs much in a run of seconds; dashboards/rules/tests has a long one.
    assert (before + since) * 0.99 <= total() <= (before + since) * 1.4


def test_a_crash_does_not_resolve_what_was_wrong(run: ScrapedRun) -> None:  # case: DSH-07
    make.wait_for(lambda: not run.prometheus.is_firing("Fp8watchRunGoneWithOpenFinding"))
    assert not run.prometheus.is_firing("Fp8watchFindingOpen", detector="nonfinite")
    run.step({"loss": math.nan, "grad_norm": 0.5})
    make.wait_for(lambda: run.prometheus.is_firing("Fp8watchFindingOpen", detector="nonfinite"))
    assert not run.prometheus.is_firing("Fp8watchRunGoneWithOpenFinding")
    run.crash()
    make.wait_for(lambda: run.prometheus.is_firing("Fp8watchRunGoneWithOpenFinding"))
    assert run.prometheus.query("fp8watch_open_findings") == []
    assert run.prometheus.is_firing("Fp8watchFindingOpen", detector="nonfinite")


@pytest.mark.alertmanager
def test_the_crash_is_told_and_what_it_contains_is_not_told_again(run: ScrapedRun) -> None:
    assert run.alerts is not None
    gone = make.wait_for(lambda: run.alerts.receiver.alerts("firing", alertname="Fp8watchRunGoneWithOpenFinding"))
    assert gone[0][0] == "fp8watch-now"
    assert gone[0][1]["labels"]["run"] == "r"
    make.wait_for(
        lambda: (
            {
                alert["status"]["state"]
                for alert in run.alerts.alerts()
                if alert["labels"]["alertname"] == "Fp8watchFindingOpen"
            }
            == {"suppressed"}
        )
    )


def test_a_run_that_is_killed_with_its_own_agent_does_not_go_unnoticed(run: ScrapedRun) -> None:
    channel = Channel(run="quiet", settings=Settings(dir=run.home, metrics_port=0))
    channel.set_preamble([make.hello("quiet"), make.layout("quiet", blocks=BLOCKS)])
    make.wait_for(channel.take)
    make.wait_for(lambda: run.prometheus.query('fp8watch_run_state{run="quiet",state="running"} == 1'))
    assert not run.prometheus.is_firing("Fp8watchRunVanished")
    found = endpoint.read(run.home, "quiet")
    assert found is not None
    channel.close()
    os.kill(found.pid, signal.SIGKILL)
    make.wait_for(lambda: run.prometheus.is_firing("Fp8watchRunVanished", run="quiet", severity="critical"))
    assert not run.prometheus.is_firing("Fp8watchRunLost", run="quiet")
    assert not run.prometheus.is_firing("Fp8watchRunVanished", run="r"), "it had a finding open, and another alert"
