"""`fp8watch controller`: decide for all runs of a cluster, or stand by for the one that does."""

from __future__ import annotations

import logging
import os
import signal
import socket
from typing import Annotated, Literal

import typer

from fp8watch.commands import values
from fp8watch.commands.output import not_found
from fp8watch.errors import BadInput, MissingDependency

logger = logging.getLogger(__name__)
app = typer.Typer(help="Decide for all runs of a cluster.", add_completion=False, pretty_exceptions_enable=False)


@app.command()
def controller(
    redis: Annotated[
        str | None,
        typer.Option(parser=values.text, metavar="URL", help="Redis of the cluster; default: FP8WATCH_REDIS_URL."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(parser=values.text, metavar="NAME", help="Name of this process; default: host and process id."),
    ] = None,
    max_mode: Annotated[str, typer.Option(help="observe, approve or auto: caps every run's policy.")] = "auto",
    metrics_host: Annotated[str, typer.Option(help="Address of /metrics.")] = "127.0.0.1",
    metrics_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of /metrics; 0: a free one.")] = 9465,
    log_level: Annotated[
        str | None, typer.Option(parser=values.log_level, metavar="LEVEL", help="Level of the log on stderr.")
    ] = None,
) -> None:
    """Serve until told to stop (SIGTERM). One of several is active, the others take over when it falls silent."""
    from fp8watch.security import PURPOSES, Signer, load_ring
    from fp8watch.security.metrics_access import MetricsAccess
    from fp8watch.settings import from_environment

    settings = from_environment()
    logging.basicConfig(level=log_level or settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    url = redis or (settings.redis_url.get_secret_value() if settings.redis_url is not None else None)
    if url is None:
        raise BadInput(["arguments:1: redis: give --redis URL or FP8WATCH_REDIS_URL"])
    if max_mode not in ("observe", "approve", "auto"):
        raise BadInput([f"arguments:1: max_mode: {max_mode!r} is none of observe, approve, auto"])
    mode: Literal["observe", "approve", "auto"] = max_mode  # type: ignore[assignment]
    try:
        from fp8watch.controller.cluster.metrics import ControllerExporter, Tally
        from fp8watch.controller.cluster.program import ClusterProgram
        from fp8watch.controller.cluster.redis_link import connect
    except MissingDependency as error:
        raise not_found(str(error)) from error
    rings = {purpose: load_ring(settings, purpose) for purpose in PURPOSES}
    access = MetricsAccess.load(settings)
    missing = [f"FP8WATCH_{purpose.upper()}_KEY" for purpose, ring in rings.items() if ring is None]
    if missing and not settings.allow_unsigned and mode != "observe":
        mode = "observe"
        logger.warning(
            "%s not set: who writes redis could make this controller act, so it only observes "
            "(FP8WATCH_ALLOW_UNSIGNED=1 where redis is trusted)", ", ".join(missing),
        )  # fmt: skip
    tally = Tally()
    program = ClusterProgram(
        connect(url, name="fp8watch-controller"),
        holder=name or f"{socket.gethostname()}-{os.getpid()}",
        lease_seconds=settings.lease_seconds,
        keep_seconds=settings.redis_keep_seconds,
        max_mode=mode,
        signer=Signer(rings["command"]),
        frame_ring=rings["frame"],
        approval_ring=rings["approval"],
        listener=tally,
        on_open=tally.open_findings,
    )
    exporter = ControllerExporter(program, tally, access)
    try:
        exporter.start(metrics_host, metrics_port)
    except OSError as error:
        logger.warning("no metrics at port %d: %s", metrics_port, error)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: program.stop())
    logger.info(
        "controller %s stands by at %s, metrics at %s", program.lease.holder, program.link.shown, exporter.url or "none"
    )
    try:
        program.run()
    finally:
        exporter.stop()
    logger.info("controller %s ends", program.lease.holder)
