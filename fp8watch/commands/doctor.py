"""`fp8watch doctor`: what is installed, what works on this machine, and what stands in the way."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import socket
import sqlite3
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from fp8watch.commands import doctor_cluster, doctor_tls, stores, values
from fp8watch.commands.checks import Check, problem
from fp8watch.commands.output import print_json, print_table
from fp8watch.commands.stores import DirOption, JsonOption
from fp8watch.errors import Unreachable

PACKAGES = (
    "torch", "transformer-engine", "torchao", "numpy", "msgspec", "pydantic", "prometheus-client", "redis", "streamlit",
    "grafana-foundation-sdk",
)  # fmt: skip


def command(
    directory: DirOption = None,
    with_torch: bool = typer.Option(True, help="Import torch, to look for accelerators (seconds)."),
    cluster: Annotated[bool, typer.Option("--cluster", help="Check Redis, controller and agents instead.")] = False,
    redis: Annotated[
        str | None,
        typer.Option(parser=values.text, metavar="URL", help="With --cluster: Redis; default: FP8WATCH_REDIS_URL."),
    ] = None,
    expect_agents: Annotated[
        int | None, typer.Option(min=0, max=1_000_000, help="With --cluster: how many nodes there should be.")
    ] = None,
    agent_socket: Annotated[
        str | None,
        typer.Option(parser=values.text, metavar="SOCKET", help="With --cluster: socket; default: FP8WATCH_AGENT."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine, or a cluster; exit 3 when something that is needed does not work."""
    from fp8watch.settings import from_environment

    home, settings = stores.folder(directory), from_environment()
    if cluster:
        checks = doctor_cluster.checks(settings, redis, expect_agents, agent_socket)
    else:
        checks = [_python(), *_packages(), _folder(home), _socket(home), _port(), _sqlite(), *_coverage(home)]
        if with_torch:
            checks.append(_accelerator())
    checks += doctor_tls.checks(settings)
    if as_json:
        print_json([{"name": c.name, "result": c.result, "detail": c.detail} for c in checks])
    else:
        print_table("fp8watch doctor", ["check", "", "detail"], [(c.name, c.result, c.detail) for c in checks])
    if any(check.result == "problem" for check in checks):
        raise typer.Exit(3)


def _python() -> Check:
    version = ".".join(str(part) for part in sys.version_info[:3])
    is_new_enough = sys.version_info >= (3, 11)
    return Check(name="python", result="ok" if is_new_enough else "problem", detail=version)


def _packages() -> list[Check]:
    checks = []
    for name in PACKAGES:
        try:
            checks.append(Check(name=name, result="ok", detail=importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            checks.append(Check(name=name, result="absent", detail="not installed"))
    return checks


def _folder(home: Path) -> Check:
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=home):
            pass
    except OSError as error:
        detail = f"{home}: {error.strerror or error}; training goes on, nothing is kept there"
        return Check(name="FP8WATCH_DIR", result="problem", detail=detail)
    return Check(name="FP8WATCH_DIR", result="ok", detail=str(home))


def _socket(home: Path) -> Check:
    from fp8watch.transport import places

    try:
        path = places.socket_path(home, f"doctor-{os.getpid()}")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(path))
        path.unlink()
    except OSError as error:
        return Check(name="unix sockets", result="problem", detail=str(error))
    return Check(name="unix sockets", result="ok", detail=str(path.parent))


def _port() -> Check:
    from fp8watch.settings import from_environment

    wanted = from_environment().metrics_port
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            return Check(name="metrics port", result="ok", detail=f"{wanted} is in use; a free one will be taken")
    return Check(name="metrics port", result="ok", detail=f"{wanted} on loopback")


def _sqlite() -> Check:
    is_new_enough = sqlite3.sqlite_version_info >= (3, 24, 0)
    detail = sqlite3.sqlite_version + ("" if is_new_enough else "; 3.24 is needed (upsert)")
    return Check(name="sqlite", result="ok" if is_new_enough else "problem", detail=detail)


def _coverage(home: Path) -> list[Check]:
    """Of the newest run: modules that are not seen are no fault of this machine, but nobody should have to ask."""
    from fp8watch.commands import coverage

    try:
        known = stores.known(home)
    except Unreachable as error:
        return [problem("redis", str(error))]
    if not known:
        return []
    run = known[-1].record.run
    with stores.reading(known[-1]) as store:
        seen = coverage.of_run(store, run)
    if seen is None:
        return [Check(name=f"run {run}", result="absent", detail="has announced no layout")]
    return [Check(name=f"run {run}", result="ok" if seen.is_whole else "absent", detail=seen.text())]


def _accelerator() -> Check:
    if importlib.util.find_spec("torch") is None:
        detail = "torch is not installed: agent, controller and console work, training does not"
        return Check(name="FP8", result="absent", detail=detail)
    import torch

    if not torch.cuda.is_available():
        detail = "no CUDA device: FP8 numerics are emulated on the CPU (slow; for rehearsals)"
        return Check(name="FP8", result="absent", detail=detail)
    major, minor = torch.cuda.get_device_capability()
    has_fp8 = (major, minor) >= (8, 9)
    detail = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
    return Check(name="FP8", result="ok" if has_fp8 else "absent", detail=detail)
