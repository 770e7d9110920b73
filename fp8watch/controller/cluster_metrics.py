"""/metrics of the cluster's controller: what it finds and does, and how it fares with its lease and Redis.

Agents export what they see of their ranks; findings and actions are counted here only.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

from fp8watch import __version__
from fp8watch.controller.cluster import ClusterProgram
from fp8watch.errors import MissingDependency
from fp8watch.metrics import BY_NAME, PREFIX
from fp8watch.records import ActionRecord, Finding, RunRecord, Stored
from fp8watch.wire import WIRE_VERSION

try:
    import prometheus_client
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector, CollectorRegistry
except ImportError as error:
    raise MissingDependency("prometheus-client", "controller") from error

logger = logging.getLogger(__name__)
_APPLIED = ("applied", "reverted")
_ENDINGS = ("helped", "no_effect", "reverted")
_NOT_APPLIED = ("failed", "vetoed", "expired", "unavailable", "refused")
MAX_RUNS = 1000
_Samples = list[tuple[tuple[str, ...], float]]


class Tally:
    """Counts records as they are stored, each once; what happened before this process began is not in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, None] = {}
        self._findings: Counter[tuple[str, ...]] = Counter()
        self._actions: Counter[tuple[str, ...]] = Counter()
        self._states: dict[str, str] = {}

    def __call__(self, record: Stored) -> None:
        """Hear of a record."""
        with self._lock:
            if isinstance(record, Finding) and self._is_new(f"{record.run} finding {record.id}"):
                self._findings[record.run, record.detector, record.cause, record.severity] += 1
            elif isinstance(record, ActionRecord):
                endings = ["pending"] if record.status in _APPLIED else []
                if record.outcome in _ENDINGS:
                    endings.append(record.outcome)
                elif record.status in _NOT_APPLIED:
                    endings.append(record.status)
                for ending in endings:
                    if self._is_new(f"{record.run} action {record.id} {ending}"):
                        self._actions[record.run, record.action, ending] += 1
            elif isinstance(record, RunRecord):
                self._states.pop(record.run, None)
                self._states[record.run] = record.state
                while len(self._states) > MAX_RUNS:
                    del self._states[next(iter(self._states))]

    def samples(self) -> dict[str, _Samples]:
        """Counts by metric."""
        with self._lock:
            known = self._states
            return {
                "findings_total": [(key, float(n)) for key, n in self._findings.items() if key[0] in known],
                "actions_total": [(key, float(n)) for key, n in self._actions.items() if key[0] in known],
                "run_state": [
                    ((run, state), float(state == now))
                    for run, now in known.items()
                    for state in ("running", "ended", "lost", "halted")
                ],
            }

    def _is_new(self, key: str) -> bool:
        if key in self._seen:
            return False
        self._seen[key] = None
        while len(self._seen) > 20_000:
            del self._seen[next(iter(self._seen))]
        return True


class ControllerExporter(Collector):
    """Serves /metrics on a thread of its own."""

    def __init__(self, program: ClusterProgram, tally: Tally) -> None:
        self._program = program
        self._tally = tally
        self._server: Any = None
        self.url = ""

    def start(self, host: str, port: int) -> None:
        """Serve. Raises `OSError` when the port cannot be had."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        self._server, _ = prometheus_client.start_http_server(port, addr=host, registry=registry)
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def stop(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def describe(self) -> list[Any]:
        """Nothing is asked of a program that has not begun."""
        return []

    def collect(self) -> Iterator[Any]:
        """Everything that has a value now."""
        program = self._program
        holder, inflow = program.lease.holder, program.inflow
        found: dict[str, _Samples] = {
            "build_info": [((__version__, str(WIRE_VERSION)), 1.0)],
            "controller_active": [((holder,), float(program.is_active))],
            "controller_term": [((holder,), float(program.lease.term))],
            "controller_takeovers_total": [((holder,), float(program.takeovers))],
            "controller_redis_errors_total": [((holder, why), float(n)) for why, n in list(program.errors.items())],
            "controller_entries_total": _by_run(inflow.taken),
            "controller_claimed_total": _by_run(inflow.claimed),
            "controller_groups_recreated_total": _by_run(inflow.recreated),
            "controller_entries_refused_total": [(key, float(n)) for key, n in list(inflow.refused.items())],
            "controller_lag_entries": _by_run(program.lags),
            "controller_delay_seconds": _by_run(program.delays),
            "store_errors_total": _by_run(program.runs.store_errors),
            **self._tally.samples(),
        }
        for name, samples in found.items():
            metric = BY_NAME[PREFIX + name]
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=metric.labels)
            for labels, value in samples:
                family.add_metric(labels, value)
            if samples:
                yield family


def _by_run(values: dict[str, int] | dict[str, float] | Counter[str]) -> _Samples:
    return [((run,), float(value)) for run, value in list(values.items())]
