"""The cluster parts of a node's agent: threads to and from Redis, spool and GPU reader.

`fp8watch_agent.program` creates it if Redis is configured, opens sessions through it and gives it the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
import time
from collections import Counter
from pathlib import Path

from fp8watch.controller.cluster.contest import Contest, words
from fp8watch.controller.cluster.redis_link import connect
from fp8watch.metrics import BY_NAME
from fp8watch.records import Command, LedgerUpdate
from fp8watch.security import Verifier, keyring
from fp8watch.security.envelope import Sealer
from fp8watch.security.keyring import KeyRing
from fp8watch_agent import incarnation
from fp8watch_agent.downlink import DownlinkThread
from fp8watch_agent.families import Family
from fp8watch_agent.gpu import GpuWatch
from fp8watch_agent.metrics_state import MetricsState
from fp8watch_agent.node_session import NodeSession
from fp8watch_agent.options import AgentOptions
from fp8watch_agent.server import AgentServer
from fp8watch_agent.spool import Spool
from fp8watch_agent.uplink import UplinkThread

logger = logging.getLogger(__name__)
CALL_SECONDS = 2.0
"""Timeout of a Redis call. The longest blocking read takes half a second."""


class NodeProgram:
    """Started once. Raises `BadInput` for an invalid Redis address."""

    def __init__(
        self,
        options: AgentOptions,
        metrics: MetricsState,
        metrics_url: str,
        frame_ring: KeyRing | None,
        verifier: Verifier | None,
    ) -> None:
        assert options.redis_url is not None
        self._options = options
        self._metrics = metrics
        self._metrics_url = metrics_url
        self._errors: Counter[str] = Counter()
        self._lock = threading.Lock()
        name = f"fp8watch-agent-{re.sub('[^A-Za-z0-9._-]', '_', options.node)}"
        # No retries here: the threads retry, and what Redis does not accept soon goes to the spool.
        up, down = (connect(options.redis_url, name=name, call_seconds=CALL_SECONDS, retries=0) for _ in range(2))
        self.shown = up.shown
        self.gpu = GpuWatch(options.node)
        self.uplink = UplinkThread(
            up,
            node=options.node,
            sealer=Sealer(options.node, incarnation.begin(spool_folder(options), time.time_ns()), frame_ring),
            spool=Spool(spool_folder(options), options.spool_limit_bytes),
            keep_seconds=options.redis_keep_seconds,
            metrics_url=metrics_url,
            keys=keyring.shown(
                {"frame": frame_ring, "command": None if verifier is None else verifier.ring},
                is_unsigned_taken=verifier is not None and verifier.ring is None,
            ),
            on_error=self._count,
        )
        self.downlink = DownlinkThread(
            down, self._deliver, self._count, verifier, node=options.node, on_contest=self._contest
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: AgentServer | None = None
        metrics.about_process = self._families

    def start(self, server: AgentServer) -> None:
        """Start the threads. Called on the event loop's thread."""
        self._loop, self._server = asyncio.get_running_loop(), server
        self.uplink.start()
        self.downlink.start()
        self.gpu.start()
        logger.info("node %s forwards to redis at %s", self._options.node, self.shown)

    def stop(self) -> None:
        """Send what is left and stop the threads; takes a few seconds at most."""
        self._loop = None
        self.downlink.stop()
        self.uplink.stop()
        self.gpu.stop()

    def open_session(self, run: str) -> NodeSession:
        """Open the session of a run."""
        self.downlink.follow(run)

        def forget() -> None:
            self.downlink.leave(run)
            self.uplink.forget(run)

        return NodeSession(
            run,
            node=self._options.node,
            send=self.uplink.send,
            metrics=self._metrics,
            metrics_url=self._metrics_url,
            socket_path=self._options.socket,
            directory=self._options.directory,
            redis=self.shown,
            forget=forget,
            learn_term=lambda term: self.uplink.learn_term(run, term),
        )

    def _deliver(self, reply: Command | LedgerUpdate) -> None:
        loop, server = self._loop, self._server
        if loop is not None and server is not None:
            try:
                loop.call_soon_threadsafe(server.deliver, reply)
            except RuntimeError:  # the loop has just ended
                logger.debug("reply for run %s came too late", reply.run)

    def _contest(self, run: str, contest: Contest | None) -> None:
        """Warn the ranks, and announce them again: the preferred node may be gone."""
        loop, server = self._loop, self._server
        if loop is not None and server is not None:
            why = "" if contest is None else words(run, self._options.node, contest)
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                loop.call_soon_threadsafe(server.contested, run, why)
        self.uplink.announce_again(run)

    def _count(self, reason: str) -> None:
        with self._lock:
            self._errors[reason] += 1

    def _families(self) -> list[Family]:
        node, up = self._options.node, self.uplink
        with self._lock:
            errors = dict(self._errors)
        found: dict[str, list[tuple[tuple[str, ...], float]]] = {
            "agent_redis_up": [((node,), float(not up.is_away))],
            "agent_spool_bytes": [((node,), float(up.waiting_bytes))],
            "agent_spool_errors_total": [((node,), float(up.spool_errors))],
            "agent_sent_total": [((node,), float(up.sent))],
            "agent_sent_bytes_total": [((node,), float(up.sent_bytes))],
            "agent_replayed_total": [((node,), float(up.replayed))],
            "agent_redis_errors_total": [((node, reason), float(count)) for reason, count in errors.items()],
            "agent_lost_total": [((node, reason), float(count)) for reason, count in up.dropped.items()],
        }
        families = [Family(metric=BY_NAME[f"fp8watch_{name}"], samples=samples) for name, samples in found.items()]
        return families + self.gpu.families(self._metrics.tokens())


def spool_folder(options: AgentOptions) -> Path:
    """The spool's folder. It has the node's name, because several nodes may share FP8WATCH_DIR."""
    return options.directory / "spool" / re.sub(r"[^A-Za-z0-9._-]", "_", options.node)
