"""The embedded background process with real processes: it dies, hangs, outlives nobody and gets in nobody's way."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import hand_made as make
import psutil
import pytest

from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.records import Layout, StepFrame, Welcome
from fp8watch.settings import Settings
from fp8watch.transport import Channel, endpoint
from fp8watch.transport.endpoint import Endpoint

HERE = Path(__file__).parent
GRACE_SECONDS = 4.0


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FP8WATCH_END_GRACE_SECONDS", str(GRACE_SECONDS))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / ".fp8watch"


class _Trainer:
    def __init__(self, run: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "trainer.py"), run], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self._output = self.process.stdout
        self.port = 0
        self.worker = 0

    def wait_until_it_trains(self) -> None:
        facts = json.loads(self._output.readline())
        self.port, self.worker = facts["port"], facts["worker"]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._output.close()
        if self.worker:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.worker, signal.SIGKILL)


@pytest.fixture
def two_trainers(home: Path) -> Iterator[tuple[_Trainer, _Trainer]]:
    trainers = (_Trainer("killed"), _Trainer("ended"))
    yield trainers
    for trainer in trainers:
        trainer.end()


def _live(home: Path, run: str) -> Endpoint:
    def look() -> Endpoint | None:
        found = endpoint.read(home, run)
        return found if found is not None and found.metrics_url else None

    found: Endpoint = make.wait_for(look, what=f"endpoint of {run}")
    return found


def _state(store: str, run: str) -> str:
    reader = SqliteStore(store, read_only=True)
    try:
        return next(record.state for record in reader.runs() if record.run == run)
    finally:
        reader.close()


def test_two_trainers_share_a_machine_and_neither_end_leaves_anything(
    home: Path, two_trainers: tuple[_Trainer, _Trainer]
) -> None:
    killed, ended = two_trainers
    for trainer in two_trainers:
        trainer.wait_until_it_trains()
    ends = {run: _live(home, run) for run in ("killed", "ended")}
    for field in ("pid", "socket", "metrics_url", "store"):
        assert getattr(ends["killed"], field) != getattr(ends["ended"], field), field
    for run, other in (("killed", "ended"), ("ended", "killed")):
        values = make.wait_for(
            lambda run=run: (v := make.scrape(ends[run].metrics_url)).get(f'fp8watch_step{{run="{run}"}}', 0) > 3 and v
        )
        assert not [name for name in values if f'run="{other}"' in name]
    targets = json.loads((home / "targets.json").read_text())
    assert len(targets) == 2
    for found in ends.values():
        loaded = [m.path for m in psutil.Process(found.pid).memory_maps()]
        assert not [path for path in loaded if "/torch/" in path]

    # kill -9 of a trainer whose worker lives on
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.process.wait()
    with socket.create_server(("127.0.0.1", killed.port)):
        pass  # the rendezvous port is free at once: the agent, still alive, has not inherited it
    assert not make.is_gone(ends["killed"].pid)
    make.wait_for(lambda: make.is_gone(ends["killed"].pid), GRACE_SECONDS + 10, "the agent to end after its grace time")
    assert not make.is_gone(killed.worker)
    assert _state(ends["killed"].store, "killed") == "lost"
    after = endpoint.read(home, "killed")
    assert after is not None
    assert (after.state, after.metrics_url, after.store) == ("ended", "", ends["killed"].store)
    assert not Path(ends["killed"].socket).exists()
    assert len(json.loads((home / "targets.json").read_text())) == 1

    # the other one was not disturbed, and ends of its own will
    assert make.scrape(ends["ended"].metrics_url)['fp8watch_run_state{run="ended",state="running"}'] == 1
    ended.process.terminate()
    assert ended.process.wait(20) == 0
    make.wait_for(lambda: make.is_gone(ends["ended"].pid))
    assert _state(ends["ended"].store, "ended") == "ended"
    assert json.loads((home / "targets.json").read_text()) == []
    assert "Traceback" not in (home / "runs/ended/agent.log").read_text()
    assert "Traceback" not in (home / "runs/killed/agent.log").read_text()


class _Sender:
    """The training thread of these tests: sends and notes how long that took."""

    def __init__(self, run: str, **settings: object) -> None:
        self.channel = Channel(run=run, settings=Settings(**settings))  # type: ignore[arg-type]
        self.channel.set_preamble([make.hello(run), self.layout(run)])
        self.run = run
        self.step = 0
        self.seconds: list[float] = []
        self.said: list[str] = []

    @staticmethod
    def layout(run: str) -> Layout:
        return make.layout(run, blocks=8, modules=tuple(f"m{n}" for n in range(14)))

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step += 1
            message: StepFrame = make.frame(self.run, self.step, 336, amax=1.0, scale=448.0)
            started = time.perf_counter()
            self.channel.send(message)
            self.seconds.append(time.perf_counter() - started)
            time.sleep(0.002)

    def notes(self) -> list[str]:
        self.said += self.channel.notes()
        return self.said

    def assert_was_never_held_up(self) -> None:
        self.seconds.sort()
        assert self.seconds[len(self.seconds) // 2] < 100e-6
        # Two cores, shared with the agent: the scheduler may take the processor away now and then.
        num_taken = 2 + len(self.seconds) // 100
        assert all(seconds < 5e-3 for seconds in self.seconds[:-num_taken])


@pytest.fixture
def sender(home: Path) -> Iterator[_Sender]:
    sender = _Sender("r", queue_frames=64)
    yield sender
    sender.channel.close(0.2)


def _metric(home: Path, name: str) -> float:
    found = endpoint.read(home, "r")
    if found is None or not found.metrics_url:
        return 0.0
    try:
        return make.scrape(found.metrics_url).get(name, 0.0)
    except OSError:
        return 0.0


def test_training_goes_on_when_the_agent_hangs_and_when_it_is_killed(home: Path, sender: _Sender) -> None:
    make.wait_for(lambda: sender.train(5) or sender.channel.is_connected)
    welcome = make.wait_for(lambda: sender.channel.take())[0]
    assert isinstance(welcome, Welcome)
    found = _live(home, "r")
    assert (welcome.metrics_url, welcome.store) == (found.metrics_url, found.store)

    os.kill(found.pid, signal.SIGSTOP)
    sender.train(280)
    lost = sender.channel.dropped["queue_full"]
    assert lost > 50
    assert sender.notes() == []
    os.kill(found.pid, signal.SIGCONT)
    make.wait_for(
        lambda: sender.train(1) or _metric(home, 'fp8watch_frames_dropped_total{reason="queue_full",run="r"}') >= lost
    )

    os.kill(found.pid, signal.SIGKILL)
    make.wait_for(lambda: sender.train(10) or sender.notes())
    assert len(sender.said) == 1
    assert "was ended by SIGKILL; restarted" in sender.said[0]
    make.wait_for(lambda: sender.train(5) or _metric(home, 'fp8watch_steps_total{run="r"}') > 5)
    again = _live(home, "r")
    assert again.pid != found.pid
    assert again.store == found.store
    at = sender.step
    make.wait_for(lambda: sender.train(1) or _metric(home, 'fp8watch_step{run="r"}') > at)

    os.kill(again.pid, signal.SIGKILL)
    make.wait_for(lambda: sender.train(10) or len(sender.notes()) == 2)
    assert "training goes on unwatched" in sender.said[1]
    assert not sender.channel.is_watched
    sender.train(10)
    assert not sender.channel.send(make.frame("r", 1))
    assert sender.channel.dropped["disconnected"] > 10
    sender.assert_was_never_held_up()


def test_a_process_that_cannot_start_is_said_and_costs_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    sender = _Sender("r")
    make.wait_for(lambda: sender.train(1) or len(sender.notes()) == 2)
    assert "exited with code 1; restarted" in sender.said[0]
    assert "training goes on unwatched" in sender.said[1]
    sender.channel.close()
    sender.assert_was_never_held_up()


def _agents(home: Path) -> list[psutil.Process]:
    """Those of this folder: another test's may still be about to end."""
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if {"fp8watch_agent", str(home)} <= set(process.cmdline()):
                found.append(process)
    return found


def test_an_end_before_the_agent_was_up_leaves_no_process(home: Path) -> None:
    sender = _Sender("r")
    (process,) = make.wait_for(lambda: _agents(home))
    sender.channel.close(0.01)
    make.wait_for(lambda: make.is_gone(process.pid))


def test_an_unwritable_folder_is_one_warning_and_a_metric(home: Path) -> None:
    home.write_text("a file is in the way")
    sender = _Sender("r")
    welcome = make.wait_for(lambda: sender.train(1) or sender.channel.take())[0]
    sender.train(20)
    assert make.scrape(welcome.metrics_url)['fp8watch_store_errors_total{run="r"}'] >= 1
    (note,) = sender.notes()
    assert "FP8WATCH_DIR cannot be written" in note
    assert Path(welcome.store).is_file()
    sender.channel.send(make.goodbye("r", sender.step))
    sender.channel.close()
    assert sender.notes() == [note]


def test_without_prometheus_client_all_but_metrics_works(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prometheus_client.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    sender = _Sender("r")
    welcome = make.wait_for(sender.channel.take)[0]
    assert welcome.metrics_url == ""
    assert sender.notes() == [
        "no metrics: prometheus-client is not installed: "
        "install the extra `agent` (in a clone: pip install -e '.[agent]')"
    ]
    sender.train(3)
    sender.channel.send(make.goodbye("r", sender.step))
    sender.channel.close()
    make.wait_for(lambda: _state(welcome.store, "r") == "ended")


def test_a_trainer_that_just_ends_is_not_held_up(home: Path, tmp_path: Path) -> None:
    code = (
        "import time; import hand_made as make; from fp8watch.settings import Settings;"
        "from fp8watch.transport import Channel;"
        "channel = Channel(run='r', settings=Settings(agent='unix:///nowhere.sock'));"
        "channel.set_preamble([make.hello('r')]); channel.send(make.frame('r', 1)); print(time.time())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE, check=False)
    assert done.returncode == 0
    assert done.stderr == "fp8watch: 1 messages were not sent: no agent at /nowhere.sock took them\n"
    assert time.time() - float(done.stdout) < 10.0


def test_the_agent_imports_neither_torch_nor_what_reads_it() -> None:
    code = (
        "import sys, fp8watch_agent.cli, fp8watch_agent.exporter;"
        "bad = [m for m in sys.modules if m == 'torch' or m.startswith(('fp8watch.capture', 'fp8watch.actions.'))];"
        "sys.exit(', '.join(bad) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
