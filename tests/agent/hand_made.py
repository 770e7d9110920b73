"""Hand-made messages of a rank, and a raw client that speaks the wire format."""

from __future__ import annotations

import os
import socket
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from fp8watch import wire
from fp8watch.columns import pack
from fp8watch.records import Goodbye, Hello, Layout, Message, Reply, StepFrame, TensorColumn

FP8_MAX = 448.0


def hello(run: str, *, rank: int = 0, attempt: int = 0, world_size: int = 1, **more: Any) -> Hello:
    fields: dict[str, Any] = {
        "wire_version": wire.WIRE_VERSION, "run": run, "attempt": attempt, "rank": rank, "local_rank": rank,
        "world_size": world_size, "pid": os.getpid(), "host": "host-a", "time_unix": time.time(), "step": 0,
        "framework": {"torch": "2.0", "gpu": "0", "gpu_uuid": "GPU-1"},
    }  # fmt: skip
    return Hello(**{**fields, **more})


def layout(
    run: str, *, rank: int = 0, layout_id: int = 1, attempt: int = 0, blocks: int = 2,
    modules: tuple[str, ...] = ("up",),
    tensors: tuple[str, ...] = ("input", "weight", "grad_output"),
) -> Layout:  # fmt: skip
    columns = [
        TensorColumn(module=f"blocks.{block}.{module}", tensor=tensor, block=str(block), fp8_format="e4m3")  # type: ignore[arg-type]
        for block in range(blocks)
        for module in modules
        for tensor in tensors
    ]
    return Layout(
        run=run, attempt=attempt, rank=rank, layout_id=layout_id, columns=columns,
        expected_modules=blocks * len(modules), observed_modules=blocks * len(modules),
    )  # fmt: skip


def frame(
    run: str, step: int, size: int = 0, *, rank: int = 0, attempt: int = 0, layout_id: int = 1,
    scalars: dict[str, float] | None = None, dropped: dict[str, int] | None = None, **columns: Any,
) -> StepFrame:  # fmt: skip
    """`columns`: name -> one number for all tensors, or a list with one for each (None: not observed)."""
    packed = {}
    for name, given in columns.items():
        values = [given] * size if np.isscalar(given) else list(given)
        valid = np.array([value is not None for value in values])
        numbers = np.array([0 if value is None else value for value in values])
        is_number = name in ("amax", "amax_local", "scale") or name.endswith("snr")
        dtype = "f4" if is_number else "u1" if name == "high_precision" else "u8"
        packed[name] = pack(numbers, dtype, valid)
    return StepFrame(
        run=run, attempt=attempt, rank=rank, step=step, layout_id=layout_id, time_unix=time.time(),
        scalars={"loss": 2.0, "grad_norm": 0.5} if scalars is None else scalars, columns=packed, dropped=dropped or {},
    )  # fmt: skip


def goodbye(run: str, step: int = 0, *, rank: int = 0) -> Goodbye:
    return Goodbye(run=run, rank=rank, step=step)


class RawClient:
    """A blocking socket that speaks the wire format."""

    def __init__(self, path: Path | str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(10)
        try:
            self.socket.connect(os.fspath(path))
        except OSError:
            self.socket.close()
            raise
        self._splitter = wire.Splitter()

    def send(self, *messages: Message) -> None:
        """In one go: whom the agent turns away may find the connection closed after the first."""
        self.socket.sendall(b"".join(wire.frame(message) for message in messages))

    def receive(self) -> Reply:
        while True:
            data = self.socket.recv(65536)
            assert data, "the agent closed the connection"
            for body in self._splitter.feed(data):
                return wire.unpack_reply(body)

    def is_closed_by_peer(self, timeout_seconds: float = 5.0) -> bool:
        self.socket.settimeout(timeout_seconds)
        try:
            while self.socket.recv(65536):
                pass
        except TimeoutError:
            return False
        except OSError:
            return True
        return True

    def close(self) -> None:
        self.socket.close()


def wait_for(condition: Callable[[], Any], timeout_seconds: float = 15.0, what: str = "") -> Any:
    """The condition's first truthy value; fails after the timeout."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {timeout_seconds} s for {what or condition}"
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    """Whether no process of that id runs (a zombie that its parent has yet to reap does not run)."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def scrape(url: str) -> dict[str, float]:
    """`name{labels}` -> value."""
    with urllib.request.urlopen(url, timeout=5) as response:
        lines = response.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
