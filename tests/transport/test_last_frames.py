"""A busy agent that answers while it still has much to read gets everything, although the trainer is leaving."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8watch import wire
from fp8watch.records import Goodbye, Hello, LedgerUpdate, Message, StepFrame
from fp8watch.settings import Settings
from fp8watch.transport import Channel

NUM_FRAMES = 200


class BusyAgent:
    """Reads little at a time and answers each time, as a controller does that labels checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.messages: list[Message] = []
        self.is_listening = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self.is_listening.wait(10)

    async def _serve(self) -> None:
        done = asyncio.Event()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            splitter = wire.Splitter()
            try:
                while data := await reader.read(2048):
                    self.messages += [wire.unpack_message(body) for body in splitter.feed(data)]
                    writer.write(wire.frame(LedgerUpdate(run="r", checkpoint="c", label="good")))
                    await asyncio.sleep(0.005)
            except ConnectionError:
                pass
            finally:
                writer.transport.abort()
                done.set()

        async with await asyncio.start_unix_server(handle, self.path):
            self.is_listening.set()
            await done.wait()

    def join(self) -> None:
        self._thread.join(15)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[BusyAgent]:
    agent = BusyAgent(tmp_path / "s")
    yield agent
    agent.join()


def test_close_waits_until_the_agent_has_read_everything(agent):
    channel = Channel(run="r", settings=Settings(agent=f"unix://{agent.path}"))
    hello = Hello(
        wire_version=1, run="r", attempt=0, rank=0, local_rank=0, world_size=1, pid=1, host="h", time_unix=0.0, step=0
    )
    channel.set_preamble([hello])
    for step in range(1, NUM_FRAMES + 1):
        scalars = {f"s{i}": 1.0 for i in range(20)}
        channel.send(StepFrame(run="r", attempt=0, rank=0, step=step, layout_id=1, time_unix=0.0, scalars=scalars))
    channel.send(Goodbye(run="r", rank=0, step=NUM_FRAMES))
    channel.close(10.0)
    agent.join()
    assert [m.step for m in agent.messages if isinstance(m, StepFrame)] == list(range(1, NUM_FRAMES + 1))
    assert isinstance(agent.messages[-1], Goodbye)
    assert channel.dropped == {}
