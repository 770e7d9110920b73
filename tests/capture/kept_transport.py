"""A transport that keeps everything it is given, instead of the thread and the agent process."""

from __future__ import annotations

from typing import Any

import pytest

from fp8watch.records import StepFrame
from fp8watch.transport.pending import as_message


class Kept:
    """Has the methods of `fp8watch.transport.channel.Channel` that a watch calls."""

    def __init__(self, **_: Any) -> None:
        self.messages: list[Any] = []

    @property
    def frames(self) -> list[StepFrame]:
        return [message for message in self.messages if isinstance(message, StepFrame)]

    has_news = True

    def send(self, message: Any) -> bool:
        self.messages.append(as_message(message))
        return True

    def take(self) -> list[Any]:
        return []

    def notes(self) -> list[str]:
        return []

    def set_preamble(self, messages: Any) -> None:
        self.messages += messages

    def await_agent(self, timeout_seconds: float) -> bool:
        return True

    def close(self, timeout_seconds: float) -> None: ...


def keep_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on every attach gets a `Kept`."""
    monkeypatch.setattr("fp8watch.training.assemble.Channel", Kept)
