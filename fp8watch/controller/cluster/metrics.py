"""/metrics of the cluster's controller: what it finds and does, and the state of its lease and of Redis.

Agents export what they see of their ranks; findings and actions are counted only here. The current state of a run and
its open findings are exported by the active controller only: a former one knows them only as of when it was active.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from fp8watch import __version__
from fp8watch.controller.cluster.departed import Counts, Departed
from fp8watch.controller.cluster.program import ClusterProgram
from fp8watch.controller.open_findings import Open
from fp8watch.errors import MissingDependency
from fp8watch.metrics import BY_NAME, PREFIX
from fp8watch.netloc import netloc, reachable
from fp8watch.records import ActionRecord, Finding, RunRecord, Stored
from fp8watch.security.metrics_access import MetricsAccess
from fp8watch.wire import WIRE_VERSION

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector, CollectorRegistry
except ImportError as error:
    raise MissingDependency("prometheus-client", "controller") from error

logger = logging.getLogger(__name__)
_APPLIED = ("applied", "reverted")
_ENDINGS = ("helped", "no_effect", "reverted")
_NOT_APPLIED = ("failed", "vetoed", "expired", "unavailable", "refused")
MAX_RUNS = 1000
"""Runs with series at most, as in an agent; those that train always have theirs."""
ENDED_TTL_SECONDS = 600.0
"""How long the series of a run are exported after its end, as in an agent (`AgentOptions.ended_ttl_seconds`)."""
_ACTIVE_ONLY = ("run_state", "open_findings")
_Samples = list[tuple[tuple[str, ...], float]]


class Tally:
    """Counts records as they are stored, each once, from the start of this process on.

    `clock` is monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._seen: dict[str, None] = {}
        self._findings: Counter[tuple[str, ...]] = Counter()
        self._actions: Counter[tuple[str, ...]] = Counter()
        self._states: dict[str, tuple[str, float]] = {}
        """Run -> its state, and since when (by `clock`)."""
        self._open: dict[str, Open] = {}
        self.on_run: Callable[[], None] = lambda: None
        """Called when a run has begun or ended, on the thread that decides."""

    def __call__(self, record: Stored) -> None:
        """Count a record."""
        if self._take(record):
            self.on_run()

    def _take(self, record: Stored) -> bool:
        """Returns whether a run has begun or ended."""
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
                before, since = self._states.pop(record.run, ("", 0.0))
                self._states[record.run] = (record.state, since if record.state == before else self.clock())
                while len(self._states) > MAX_RUNS:
                    over = (run for run, (state, _) in self._states.items() if state != "running")
                    self._forget(next(over, next(iter(self._states))))
                return record.state != before
        return False

    def open_findings(self, run: str, found: Open) -> None:
        """Set the findings of a run that are open now: the listener of `OpenFindings`."""
        with self._lock:
            self._open.pop(run, None)
            self._open[run] = found
            while len(self._open) > MAX_RUNS:
                del self._open[next(iter(self._open))]

    def samples(self) -> dict[str, _Samples]:
        """Samples by metric, without the runs that ended more than `ENDED_TTL_SECONDS` ago."""
        with self._lock:
            now = self.clock()
            for run, (state, since) in list(self._states.items()):
                if state != "running" and now - since > ENDED_TTL_SECONDS:
                    self._forget(run)
            known = self._states
            return {
                "findings_total": [(key, float(n)) for key, n in self._findings.items() if key[0] in known],
                "actions_total": [(key, float(n)) for key, n in self._actions.items() if key[0] in known],
                "run_state": [
                    ((run, state), float(state == held))
                    for run, (held, _) in known.items()
                    for state in ("running", "ended", "lost", "halted")
                ],
                "open_findings": [
                    (labels, value)
                    for run, found in self._open.items()
                    if run in known
                    for labels, value in (
                        *(((run, "", "", severity), 0.0) for severity in ("warn", "act")),
                        *(((run, *finding), 1.0) for finding in sorted(found)),
                    )
                ],
            }

    def _forget(self, run: str) -> None:
        del self._states[run]
        self._open.pop(run, None)
        for counted in (self._findings, self._actions):
            for key in [key for key in counted if key[0] == run]:
                del counted[key]

    def _is_new(self, key: str) -> bool:
        if key in self._seen:
            return False
        self._seen[key] = None
        while len(self._seen) > 20_000:
            del self._seen[next(iter(self._seen))]
        return True


class ControllerExporter(Collector):
    """Serves /metrics in a separate thread."""

    def __init__(self, program: ClusterProgram, tally: Tally, access: MetricsAccess | None = None) -> None:
        self._program = program
        self._access = access or MetricsAccess()
        self._tally = tally
        self._departed = Departed(tally.clock, ttl_seconds=ENDED_TTL_SECONDS, most=MAX_RUNS)
        tally.on_run = self._forget_departed
        self._server: Any = None
        self.url = ""

    def start(self, host: str, port: int) -> None:
        """Start serving. Raises `OSError` if the port is not available."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        self._server, _ = self._access.serve(registry, host, port)
        self.url = f"{self._access.scheme}://{netloc(reachable(host), self._server.server_port)}/metrics"

    def stop(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def describe(self) -> list[Any]:
        """Empty, so that registering does not collect from a program that has not started."""
        return []

    def collect(self) -> Iterator[Any]:
        """All metrics that have a value now."""
        self._forget_departed()
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
            "controller_set_aside_total": _by_run(program.aside.times),
            "controller_lag_entries": _by_run(program.lags),
            "controller_delay_seconds": _by_run(program.delays),
            "store_errors_total": _by_run(program.runs.store_errors),
            **self._tally.samples(),
        }
        for name in () if program.is_active else _ACTIVE_ONLY:
            found[name] = []
        for name, samples in found.items():
            metric = BY_NAME[PREFIX + name]
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=metric.labels)
            for labels, value in samples:
                family.add_metric(labels, value)
            if samples:
                yield family

    def _forget_departed(self) -> None:
        program = self._program
        inflow = program.inflow
        counts: list[Counts] = [
            inflow.taken, inflow.claimed, inflow.recreated, inflow.refused, program.aside.times, program.lags,
            program.delays, program.runs.store_errors,
        ]  # fmt: skip
        self._departed.look(inflow.following(), counts)


def _by_run(values: dict[str, int] | dict[str, float] | Counter[str]) -> _Samples:
    return [((run,), float(value)) for run, value in list(values.items())]
