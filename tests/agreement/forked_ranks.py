"""Starts rank processes forked from a server that has torch loaded: half a second in place of four.

One by one, or by torchrun itself, whose `--start-method` has its workers started in the same way. The server is
multiprocessing's own, one for the whole session of tests, and ends with it.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_LOADED = [
    "torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict", "torch.utils.data", "fp8watch.training.attachment", "fp8watch.emulation",
    "fp8watch.checkpoints.dcp", "torch._dynamo", "torch.distributed.run", "ruamel.yaml",
]  # fmt: skip


def _settle(environment: dict[str, str], log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)


def _rank(program: str, arguments: list[str], environment: dict[str, str], log: str) -> None:
    """What a rank's process does: the program as if Python had been started with it."""
    _settle(environment, log)
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(Path(program).parent))
    runpy.run_path(program, run_name="__main__")


def _torchrun(arguments: list[str], environment: dict[str, str], log: str) -> None:
    _settle(environment, log)
    from torch.distributed import run

    run.main(["--run-path", "--start-method=fork", *arguments])


def _start(work: Callable[..., None], *arguments: object) -> ForkServerProcess:
    _CONTEXT.set_forkserver_preload(_LOADED)
    process = _CONTEXT.Process(target=work, args=arguments)
    process.start()
    return process


def start(
    program: Path, arguments: Sequence[str], environments: Sequence[Mapping[str, str]], logs: Sequence[Path]
) -> list[ForkServerProcess]:
    """One process for each environment; what it writes to stderr goes to its log."""
    return [
        _start(_rank, str(program), list(arguments), dict(environment), str(log))
        for environment, log in zip(environments, logs, strict=True)
    ]


def start_torchrun(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> ForkServerProcess:
    """`torchrun ARGUMENTS`."""
    return _start(_torchrun, list(arguments), dict(environment), str(log))


def codes(processes: Sequence[ForkServerProcess], seconds: float) -> list[int | None]:
    """Exit codes, negative where a signal ended a process; None: it was killed because it had not ended by then."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    found = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return found
