"""A small FP8 model in training, and a channel that keeps what is sent and hands out what a test puts in."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.emulation import convert
from fp8watch.records import Command, Message, Reply, StepFrame
from fp8watch.settings import Settings
from fp8watch.transport.pending import Outgoing, as_message

T = TypeVar("T")


START = "this start"
"""What the tests' attaches call their start (`Hello.start`), so that commands can be made beforehand."""


class RecordingChannel:
    """Stands in for the transport: no thread, no process."""

    made: ClassVar[list[RecordingChannel]] = []

    def __init__(self, *, run: str, settings: Settings, local_rank: int = 0) -> None:
        self.run = run
        self.sent: list[Message] = []
        self.preamble: list[Message] = []
        self.replies: list[Reply] = []
        self.dropped: dict[str, int] = {}
        self.is_closed = False
        RecordingChannel.made.append(self)

    @property
    def has_news(self) -> bool:
        return True

    def send(self, message: Outgoing) -> bool:
        self.sent.append(as_message(message))
        return True

    def take(self) -> list[Reply]:
        replies, self.replies = self.replies, []
        return replies

    def count_dropped(self, reason: str, count: int = 1) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + count

    def set_preamble(self, messages: Sequence[Message]) -> None:
        self.preamble = list(messages)

    def notes(self) -> list[str]:
        return []

    def await_agent(self, timeout_seconds: float) -> bool:
        return True

    def close(self, timeout_seconds: float = 2.0) -> None:
        self.is_closed = True

    def of(self, kind: type[T]) -> list[T]:
        return [message for message in self.sent if isinstance(message, kind)]


def make_model(*, fp8: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))
    if fp8:
        convert(model)
    return model


class Trainer:
    """The loop of the documentation on a fixed regression task."""

    def __init__(self, *, fp8: bool = True, lr: float = 1e-2) -> None:
        self.model = make_model(fp8=fp8)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(16, 32, generator=generator)
        self.targets = torch.randn(16, 32, generator=generator)

    def loss(self) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(self.inputs), self.targets)

    def steps(self, watch: Any, count: int, *, clip: float | None = 1.0) -> list[float]:
        losses = []
        for _ in range(count):
            loss = self.loss()
            loss.backward()
            if clip is not None:
                watch.clip_grad_norm_(self.model.parameters(), max_norm=clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            watch.step(loss)
            losses.append(loss.item())
        return losses


def command(name: str, step: int = 10_000, **fields: Any) -> Command:
    """A command with the usual identity; `fields` override."""
    values: dict[str, Any] = {
        "id": f"a-{name}", "run": "r", "attempt": 0, "term": 1, "sequence": 1, "verb": "apply",
        "action": name, "params": {}, "last_step": step, "start": START,
    }  # fmt: skip
    return Command(**{**values, **fields})


def stored_steps(path: Path, run: str, last: int, patience_seconds: float = 20.0) -> list[int]:
    """Steps in the store, once the background process has written the last one (sending does not wait for it)."""
    deadline = time.monotonic() + patience_seconds
    while True:
        steps: list[int] = []
        if path.exists():
            store = SqliteStore(path)
            steps = [frame.step for frame in store.read(run, StepFrame)]
            store.close()
        if steps[-1:] == [last] or time.monotonic() > deadline:
            return steps
        time.sleep(0.1)
