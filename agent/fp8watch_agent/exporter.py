"""Serves /metrics: its own registry, one collector that reads `MetricsState`, one HTTP server thread.

It does not touch `prometheus_client`'s global registry. Series and text are made without holding the state's lock.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from typing import Any

from fp8watch.errors import MissingDependency
from fp8watch.metrics import HEADROOM_BUCKETS
from fp8watch.netloc import netloc, reachable
from fp8watch.security.metrics_access import MetricsAccess
from fp8watch_agent.families import Family
from fp8watch_agent.metrics_state import MetricsState

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.registry import Collector, CollectorRegistry
except ImportError as error:
    raise MissingDependency("prometheus-client", "agent") from error

logger = logging.getLogger(__name__)


class StateCollector(Collector):
    """Turns snapshots into `prometheus_client` families."""

    def __init__(self, state: MetricsState) -> None:
        self._state = state

    def collect(self) -> Iterator[Any]:
        """Families that have samples now."""
        for family in self._state.snapshot():
            if family.samples or family.buckets:
                yield _translate(family)


class Exporter:
    """The HTTP server. `url` is its address after `start`."""

    def __init__(self, state: MetricsState, access: MetricsAccess | None = None) -> None:
        self._access = access or MetricsAccess()
        self.registry = CollectorRegistry()
        self.registry.register(StateCollector(state))
        self.url = ""
        self.target = ""
        self._server: Any = None
        self._thread: Any = None

    def start(self, host: str, port: int) -> None:
        """Serve on `port`, or on a free port if it is in use. Raises `OSError` when it cannot bind."""
        try:
            self._serve(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == 0:
                raise
            self._serve(host, 0)
            logger.info("port %d is taken; /metrics is at %s", port, self.url)

    def stop(self) -> None:
        """Stop serving and close the port."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(timeout=5)
            self._server = None

    def _serve(self, host: str, port: int) -> None:
        self._server, self._thread = self._access.serve(self.registry, host, port)
        self.target = netloc(reachable(host), self._server.server_port)
        self.url = f"{self._access.scheme}://{self.target}/metrics"


def _translate(family: Family) -> Any:
    metric = family.metric
    if metric.kind == "histogram":
        # No sum: head-room may be negative, and a falling sum would look like a counter reset.
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        bounds = [*map(str, HEADROOM_BUCKETS), "+Inf"]
        for labels, counts in family.buckets:
            histogram.add_metric(labels, buckets=list(zip(bounds, counts, strict=True)), sum_value=None)
        return histogram
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    translated = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in family.samples:
        translated.add_metric(labels, value)
    return translated
