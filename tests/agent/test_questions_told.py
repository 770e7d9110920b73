"""A question that waits for a person is said where the training is looked at: on its stderr, by one rank, once."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hand_made import RawClient, frame, hello

from fp8watch.controller.service import RunController
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.records import ActionRecord, Message, Reply, Stored, Welcome
from fp8watch_agent import server
from fp8watch_agent.lifecycle import Lifecycle
from fp8watch_agent.metrics_state import MetricsState
from fp8watch_agent.options import AgentOptions
from fp8watch_agent.questions import MAX_UNSAID, Questions
from fp8watch_agent.session import RunSession


def action(status: str, number: int = 1, **more: object) -> ActionRecord:
    return ActionRecord(
        id=f"r-{number}", run="r", attempt=0, action="rollback", params={"checkpoint": "s-100", "changes": []},
        rule="x", finding="f1", mode="approve", status=status, decided_step=124, **{"expires_step": 174, **more},  # type: ignore[arg-type]
    )  # fmt: skip


def told(*records: Stored) -> list[str]:
    questions = Questions()
    for record in records:
        questions.hear(record)
    return questions.take()


ASKED = "step 124: rollback (checkpoint s-100) waits for a person until step 174: fp8watch actions approve r-1"


def test_a_question_and_its_end_are_told_once_each() -> None:
    end = action("expired", reason="nobody answered in 50 steps")
    assert told(action("waiting"), action("waiting", also=["i2"]), end, end) == [
        ASKED,
        "step 124: rollback (checkpoint s-100) (r-1), which waited for a person, has expired: "
        "nobody answered in 50 steps",
    ]
    (refused,) = told(action("refused", reason="refused by mara", answered_by="mara"))
    assert refused.endswith("which waited for a person, is refused: refused by mara")


def test_what_asked_nobody_or_is_done_is_not_told() -> None:
    assert told(action("sent"), action("applied", applied_step=130)) == []
    assert told(action("refused", expires_step=None), action("expired", expires_step=None)) == []
    assert told(action("proposed", expires_step=None)) == []


def test_what_nobody_takes_does_not_grow() -> None:
    assert len(told(*(action("waiting", number) for number in range(MAX_UNSAID + 9)))) == MAX_UNSAID


class Asking:
    """A controller that stores a question at the first frame."""

    def __init__(self, store, listener) -> None:
        self._listener = listener

    def receive(self, message: Message) -> list[Reply]:
        if message.__struct_config__.tag == "frame":
            self._listener(action("waiting"))
        return []

    def lost(self, run: str, rank: int) -> list[Reply]:
        return []

    def tick(self) -> list[Reply]:
        return []


def test_of_several_ranks_one_is_told(tmp_path: Path) -> None:
    path = tmp_path / "s"
    options = AgentOptions(socket=path, directory=tmp_path, run="r")
    metrics = MetricsState(clock=time.monotonic)

    def talk() -> list[list[str]]:
        clients = [RawClient(path) for _ in range(2)]
        for rank in (1, 0):
            clients[rank].send(hello("r", rank=rank, world_size=2))
            clients[rank].receive()
        clients[1].send(frame("r", 1, rank=1))
        first = clients[0].receive()
        assert isinstance(first, Welcome)
        clients[1].socket.settimeout(0.5)
        with pytest.raises(TimeoutError):
            clients[1].receive()
        for client in clients:
            client.close()
        return [first.warnings]

    async def scene() -> list[list[str]]:
        agent = server.AgentServer(
            lifecycle=Lifecycle(is_embedded=False, started=time.monotonic(), connect_seconds=9, end_grace_seconds=9),
            metrics=metrics, only_run="r",
            open_session=lambda run: RunSession(run, options=options, metrics=metrics, metrics_url="", make=Asking),
        )  # fmt: skip
        serving = asyncio.create_task(agent.serve(server.listen(path)))
        said = await asyncio.to_thread(talk)
        agent.stop()
        await serving
        return said

    assert asyncio.run(scene()) == [[ASKED]]


PROGRAM = """
import time, torch, fp8watch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
watch = fp8watch.attach(model, optimizer, run="r", policy="ask.yaml")
for step in range(1, 241):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    watch.step(loss * float("nan") if step > 60 else loss)
    time.sleep(0.02)
"""
POLICY = """version: 1
mode: approve
approval: {timeout_steps: 40, default: refuse}
rules:
  - name: broken
    when: {detector: nonfinite, severity: act}
    ladder: [{action: hold_lr, factor: 0.5, settle_steps: 5}]
"""


def test_a_training_that_asks_says_so_on_its_stderr(tmp_path: Path) -> None:
    (tmp_path / "ask.yaml").write_text(POLICY)
    home = tmp_path / "home"
    environment = os.environ | {"FP8WATCH_DIR": str(home), "XDG_RUNTIME_DIR": str(tmp_path), "FP8WATCH_REPORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    store = SqliteStore(home / "runs" / "r" / "store.sqlite")
    asked, *_ = [item for item in store.read("r", ActionRecord) if item.expires_step is not None]
    store.close()
    lines = [line for line in done.stderr.splitlines() if asked.id in line]
    until = f"waits for a person until step {asked.expires_step}: fp8watch actions approve {asked.id}"
    assert lines[0] == f"fp8watch: step {asked.decided_step}: hold_lr (factor 0.5) {until}"
    assert "has expired: nobody answered in 40 steps" in lines[1]
    assert len(lines) == 2


def test_a_question_that_a_restart_of_the_controller_ends_is_told(tmp_path: Path) -> None:
    options = AgentOptions(socket=tmp_path / "s", directory=tmp_path, run="r")
    opened = [
        RunSession(
            "r", options=options, metrics=MetricsState(clock=time.monotonic), metrics_url="",
            make=lambda store, listener: RunController(store, clock=time.time, listener=listener),
        )
        for _ in range(2)
    ]  # fmt: skip
    before, after = opened
    (welcome, *_) = before.receive(hello("r"))
    assert isinstance(welcome, Welcome)
    assert before.questions() is None
    store = SqliteStore(Path(welcome.store))
    store.append("r", [action("waiting")])
    store.close()
    before.close()
    after.receive(hello("r"))
    after.receive(frame("r", 1))
    told_now = after.questions()
    assert told_now is not None
    (text,) = told_now.warnings
    assert text.startswith("step 124: rollback (checkpoint s-100) (r-1), which waited for a person, has expired")
    assert "the controller was restarted" in text
    after.close()
