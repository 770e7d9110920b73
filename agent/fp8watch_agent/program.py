"""The agent process from start to exit: socket, exporter, sessions, signals, clean-up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8watch.controller.service import RunController
from fp8watch.controller.stores.base import Store
from fp8watch.errors import EXIT_BAD_INPUT, EXIT_UNREACHABLE, BadInput, MissingDependency, Unreachable
from fp8watch.policy.load import parse
from fp8watch.records import Hello, Stored
from fp8watch.security import KeyRing, Signer, Verifier, load_ring
from fp8watch.security.metrics_access import MetricsAccess
from fp8watch.settings import from_environment
from fp8watch.transport import places
from fp8watch_agent import server
from fp8watch_agent.lifecycle import Lifecycle
from fp8watch_agent.metrics_state import MetricsState
from fp8watch_agent.options import AgentOptions
from fp8watch_agent.peers import EVERYBODY, OWNER_ONLY, Owners
from fp8watch_agent.session import Controller, RunSession

if TYPE_CHECKING:
    from fp8watch_agent.exporter import Exporter
    from fp8watch_agent.node_program import NodeProgram

logger = logging.getLogger(__name__)


def run(options: AgentOptions) -> int:
    """Serve until told to stop; returns the exit code. 2: a key, certificate or address is invalid, or a package is
    missing. 3: the socket cannot be bound, or the Redis Cluster is unreachable."""
    try:
        keys = Keys.load()
        if not options.is_embedded:  # an embedded agent runs without /metrics rather than not at all
            MetricsAccess.load(from_environment())
    except BadInput as error:
        logger.error("%s", "; ".join(error.problems))
        return EXIT_BAD_INPUT
    try:
        if options.is_embedded:
            places.private_folder(options.socket.parent)
        else:
            options.socket.parent.mkdir(parents=True, exist_ok=True)
        listener = server.listen(options.socket, EVERYBODY if options.any_user else OWNER_ONLY)
    except OSError as error:
        logger.error("cannot serve %s: %s", options.socket, error)
        return EXIT_UNREACHABLE
    metrics = MetricsState(
        clock=time.monotonic,
        series_budget=options.series_budget,
        worst_layers=options.worst_layers,
        ended_ttl_seconds=options.ended_ttl_seconds,
        mode_of=_mode,
    )
    exporter, problem = _start_exporter(metrics, options)
    url = "" if exporter is None else exporter.url
    logger.info("agent %d serves %s, metrics at %s", os.getpid(), options.socket, url or "none")
    try:
        node = _node(options, metrics, url, keys)
        asyncio.run(_serve(options, metrics, listener, url, problem, keys, node))
    except (BadInput, MissingDependency) as error:
        logger.error("%s", error)
        return EXIT_UNREACHABLE if isinstance(error, Unreachable) else EXIT_BAD_INPUT
    finally:
        if exporter is not None:
            exporter.stop()
        listener.close()
    logger.info("agent %d ends", os.getpid())
    return 0


async def _serve(
    options: AgentOptions, metrics: MetricsState, listener: socket.socket, metrics_url: str, problem: str | None,
    keys: Keys, node: NodeProgram | None,
) -> None:  # fmt: skip
    identity = os.lstat(options.socket)

    def make_controller(store: Store, listener: Callable[[Stored], None]) -> Controller:
        return RunController(
            store, clock=time.time, listener=listener, directory=options.directory,
            signer=keys.signer, approval_ring=keys.approval_ring, on_unseen=metrics.unseen,
            on_open=metrics.open_findings,
        )  # fmt: skip

    def open_session(name: str) -> server.Session:
        if node is not None:
            return node.open_session(name)
        session = RunSession(name, options=options, metrics=metrics, metrics_url=metrics_url, make=make_controller)
        if problem is not None:
            session.warn(problem)
        return session

    agent = server.AgentServer(
        lifecycle=Lifecycle(
            is_embedded=options.is_embedded,
            started=time.monotonic(),
            connect_seconds=options.connect_seconds,
            end_grace_seconds=options.end_grace_seconds,
        ),
        metrics=metrics,
        open_session=open_session,
        only_run=options.run,
        parent_pid=options.parent_pid,
        owners=Owners(any_user=options.any_user),
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.stop)
    if node is not None:
        node.start(agent)
    try:
        await agent.serve(listener)
    finally:
        if node is not None:
            node.stop()
        # Only our own: a successor may have bound its socket at this path already.
        with contextlib.suppress(OSError):
            server.remove_own(options.socket, identity)


def _node(options: AgentOptions, metrics: MetricsState, url: str, keys: Keys) -> NodeProgram | None:
    """The cluster parts, or None. Only they need redis-py."""
    if not options.is_cluster:
        return None
    from fp8watch.controller.cluster.redis_link import RedisError, shown
    from fp8watch_agent.node_program import NodeProgram

    if keys.verifier is None:
        logger.warning("no command key (FP8WATCH_COMMAND_KEY): commands from redis are not passed on")
    try:
        return NodeProgram(options, metrics, url, keys.frame_ring, keys.verifier)
    except RedisError as error:  # only a Redis Cluster connects at once; a single server is waited for
        raise Unreachable([f"redis at {shown(options.redis_url or '')} cannot be reached: {error}"]) from error


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that this process signs and verifies with."""

    signer: Signer
    approval_ring: KeyRing | None
    frame_ring: KeyRing | None
    verifier: Verifier | None
    """Verifies commands from Redis; None: none may be passed on."""

    @classmethod
    def load(cls) -> Keys:
        """Load the keys from the environment. Raises `BadInput`."""
        settings = from_environment()
        command, approval, frame = (load_ring(settings, purpose) for purpose in ("command", "approval", "frame"))
        can_verify = command is not None or settings.allow_unsigned
        return cls(Signer(command), approval, frame, Verifier(command) if can_verify else None)


def _start_exporter(metrics: MetricsState, options: AgentOptions) -> tuple[Exporter | None, str | None]:
    """The exporter, or None and the reason. Findings and actions do not depend on it."""
    try:
        from fp8watch_agent.exporter import Exporter

        exporter = Exporter(metrics, MetricsAccess.load(from_environment()))
        exporter.start(options.metrics_host, options.metrics_port)
    except (BadInput, MissingDependency, OSError) as error:
        logger.warning("no metrics: %s", error)
        return None, f"no metrics: {error}"
    return exporter, None


def _mode(hello: Hello) -> str:
    if hello.policy is None:
        return "observe"
    try:
        return parse(hello.policy, hello.policy_name).mode
    except Exception as error:  # the controller reports it; here it is only a label
        logger.debug("policy of run %s: %s", hello.run, error)
        return "observe"
