"""`fp8watch controller`: decide for all runs of a cluster, or stand by for the controller that does."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from fp8watch.commands import values
from fp8watch.commands.output import not_found
from fp8watch.errors import BadInput, MissingDependency
from fp8watch.vocabulary import Mode

if TYPE_CHECKING:
    from fp8watch.controller.cluster.metrics import ControllerExporter
    from fp8watch.controller.cluster.program import ClusterProgram

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
        typer.Option(
            parser=values.text, metavar="NAME", help="Name of this process (a suffix is added); default: host, pid."
        ),
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
    from fp8watch.security.keyring import shown as shown_keys
    from fp8watch.security.metrics_access import MetricsAccess
    from fp8watch.settings import from_environment

    settings = from_environment()
    logging.basicConfig(level=log_level or settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    url = redis or (settings.redis_url.get_secret_value() if settings.redis_url is not None else None)
    if url is None:
        raise BadInput(["arguments:1: redis: give --redis URL or FP8WATCH_REDIS_URL"])
    mode = wanted = _max_mode(max_mode)
    try:
        from fp8watch.controller.cluster.metrics import ControllerExporter, Tally
        from fp8watch.controller.cluster.presence import ControllerPresence
        from fp8watch.controller.cluster.program import ClusterProgram
        from fp8watch.controller.cluster.redis_link import RedisError, connect, shown, words_of
    except MissingDependency as error:
        raise not_found(str(error)) from error
    rings = {purpose: load_ring(settings, purpose) for purpose in PURPOSES}
    access = MetricsAccess.load(settings)
    missing = [f"FP8WATCH_{purpose.upper()}_KEY" for purpose, ring in rings.items() if ring is None]
    if not settings.allow_unsigned:
        mode = _observe_without(missing, mode)
    tally = Tally()
    try:
        link = connect(url, name="fp8watch-controller")
    except RedisError as error:  # of a Redis Cluster, at once; what is one server is waited for
        raise not_found(f"{shown(url)} cannot be reached: {words_of(error)}") from error
    program = ClusterProgram(
        link,
        holder=_holder(name),
        lease_seconds=settings.lease_seconds,
        keep_seconds=settings.redis_keep_seconds,
        keep_days=settings.redis_keep_days,
        keep_runs=settings.redis_keep_runs,
        max_mode=mode,
        signer=Signer(rings["command"]),
        frame_ring=rings["frame"],
        approval_ring=rings["approval"],
        listener=tally,
        on_open=tally.open_findings,
    )
    about = shown_keys(rings, is_unsigned_taken=settings.allow_unsigned) | {"max_mode": wanted, "mode": mode}
    presence = ControllerPresence(
        lambda: connect(url, name="fp8watch-controller-presence"),
        program.lease.holder,
        lambda: program.is_active,
        about,
    )
    presence.start()
    try:
        _serve(program, ControllerExporter(program, tally, access), metrics_host, metrics_port)
    finally:
        presence.stop()


def _holder(name: str | None) -> str:
    """What this process holds the lease as. The suffix tells two apart that were given one name, or that are process 1
    of containers on one host: they would take each other's lease for their own."""
    return f"{name or f'{socket.gethostname()}-{os.getpid()}'}-{secrets.token_hex(3)}"


def _max_mode(text: str) -> Mode:
    """The mode of this name. Raises `BadInput`."""
    if text not in get_args(Mode):
        raise BadInput([f"arguments:1: max_mode: {text!r} is none of {', '.join(get_args(Mode))}"])
    return text  # type: ignore[return-value]


def _observe_without(missing: list[str], mode: Mode) -> Mode:
    """The mode allowed without these keys: without any of them, anybody who can write to Redis could act through us."""
    if not missing or mode == "observe":
        return mode
    logger.warning(
        "%s not set: who writes redis could make this controller act, so it only observes "
        "(FP8WATCH_ALLOW_UNSIGNED=1 where redis is trusted)", ", ".join(missing),
    )  # fmt: skip
    return "observe"


def _serve(program: ClusterProgram, exporter: ControllerExporter, host: str, port: int) -> None:
    """Run until SIGTERM or SIGINT. A port that cannot be had costs the metrics only."""
    try:
        exporter.start(host, port)
    except OSError as error:
        logger.warning("no metrics at port %d: %s", port, error)
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
