"""Starts real ranks with a controller that only gives orders, and reads what they wrote down."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked_ranks
from fake_controller import Cut, FakeController, Order
from free_ports import free_port

from fp8watch.records import Command

FOLDER = Path(__file__).parent
ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 220.0
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Else torchrun's restarted ranks find the addresses of those before them in the store and connect to nobody."""


def command(run: str, number: int, action: str, **fields: Any) -> Command:
    values: dict[str, Any] = {
        "id": f"{action}-{number}", "run": run, "attempt": 0, "term": 1, "sequence": number, "verb": "apply",
        "action": action, "params": {}, "last_step": 1000,
    }  # fmt: skip
    return Command(**{**values, **fields})


def in_turn(run: str, *wanted: tuple[str, dict[str, Any]], every: int = 6) -> list[Order]:
    return [
        Order(command=command(run, number, action, **fields), after=3 + every * (number - 1))
        for number, (action, fields) in enumerate(wanted, 1)
    ]


@dataclass(frozen=True)
class Launch:
    ranks: int
    folder: Path
    codes: list[int]
    controller: FakeController
    written: Mapping[str, str]
    """File name -> what ranks had written down when this launch was over; a later one writes into the same files."""

    def lines(self, scenario: str, rank: int) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.written[f"{scenario}-{rank}.jsonl"].splitlines()]

    def steps(self, scenario: str, rank: int) -> list[dict[str, Any]]:
        return [line for line in self.lines(scenario, rank) if "ended" not in line]

    def ends(self, scenario: str) -> list[str]:
        return [self.lines(scenario, rank)[-1].get("ended", "killed") for rank in range(self.ranks)]

    def assert_one_state(self, scenario: str, *, ranks: list[int] | None = None) -> None:
        """No step was finished in different states; parameters included."""
        by_rank = [self.steps(scenario, rank) for rank in ranks or range(self.ranks)]
        for lines in zip(*by_rank, strict=False):
            assert all(line == lines[0] for line in lines), f"step {lines[0]['step']}"

    def statuses(self, scenario: str, order: Order) -> list[list[tuple[str, str]]]:
        answers = self.controller.answers(scenario, order.command)
        return [[(r.status, r.readback) for r in answers.get(rank, [])] for rank in range(self.ranks)]


def launch(
    program: str,
    ranks: int,
    scenarios: list[str],
    folder: Path,
    orders: Mapping[str, Sequence[Order]],
    *,
    cuts: Mapping[str, Sequence[Cut]] | None = None,
    with_torchrun: bool = False,
    restarts: int = 0,
) -> Launch:
    """Play scenarios of a program beside this file, on real processes; by `torchrun`, or forked one by one.

    `folder` may hold what an earlier launch has left. `restarts`: how often torchrun starts all ranks anew when one
    has failed.
    """
    port = free_port()
    sockets = Path(tempfile.mkdtemp(prefix="fp8w"))  # a socket's path is short
    controller = FakeController(sockets / "c.sock", orders, cuts)
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1",
        "FP8WATCH_AGENT": controller.address, "FP8WATCH_DIR": str(folder / "fp8watch"), "FP8WATCH_REPORT": "0",
        "FP8WATCH_METRICS_PORT": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "agent")]),
    }  # fmt: skip
    arguments = [str(folder), *scenarios]
    logs = [folder / f"stderr-{rank}" for rank in range(1 if with_torchrun else ranks)]
    if with_torchrun:
        options = ["--nnodes=1", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", "--rdzv-backend=c10d"]
        options += [f"--rdzv-endpoint=127.0.0.1:{port}", str(FOLDER / program), *arguments]
        processes = [forked_ranks.start_torchrun(options, {**environment, **FRESH_STORE}, logs[0])]
    else:
        environments = [
            {
                **environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks), "MASTER_PORT": str(port),
            }
            for rank in range(ranks)
        ]  # fmt: skip
        processes = forked_ranks.start(FOLDER / program, arguments, environments, logs)
    codes = forked_ranks.codes(processes, PATIENCE_SECONDS)
    controller.close()
    shutil.rmtree(sockets)
    if None in codes:
        said = "\n".join(log.read_text()[-3000:] for log in logs)
        raise AssertionError(f"ranks hang\n{said}")
    written = {path.name: path.read_text() for path in folder.glob("*.jsonl")}
    return Launch(ranks, folder, [code for code in codes if code is not None], controller, written)
