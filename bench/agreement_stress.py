"""Random sequences of faults and actions on real ranks: all ranks have to come out of each with the same parameters.

    python bench/agreement_stress.py [--sequences 200] [--launches 4] [--ranks 4] [--seed 0] [--out FILE]

Each launch plays its share of the sequences one after the other in the same processes (torch takes seconds to load). A
sequence is a data-parallel training run in emulated FP8 with dropout, a shuffled loader and checkpoints, some twenty
steps long; commands come over a real socket in the real wire format, at random steps, late on some ranks or never.
Faults: a slow rank, a rank that cannot do it, a rank on which it fails after the vote, damaged and missing shards, a
full disk, a connection that is cut, a disarmed rank, a repeated command. A sequence passes when at each step that all
ranks made the parameters are the same on all of them (compared bit by bit through a checksum), when all ended alike,
and when the log of what was carried out, with the steps, is the same on all ranks. `lag_steps` are the steps from the
frame that a command was the answer to until it was carried out, of commands that were sent to all ranks at once.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import random
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from result_head import head

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "agreement"))

import forked_ranks  # noqa: E402
from fake_controller import Cut, FakeController, Order  # noqa: E402

from fp8watch.records import Command, CommandResult  # noqa: E402

STEPS, EVERY, NEVER = 24, 5, 10**6
ACTS = "{version: 1, mode: auto, rules: [{name: n, when: {detector: nonfinite}, ladder: [{action: halt}]}]}"
ORDERS: list[tuple[str, dict[str, Any]]] = [
    ("hold_lr", {"factor": 0.5}), ("rewarm", {"steps": 5, "start_factor": 0.1}), ("tighten_clip", {"max_norm": 0.05}),
    ("bf16_layers", {"layers": ["module.0"]}), ("bf16_all", {}), ("raise_margin", {"bits": 1}), ("repair_scale", {}),
    ("skip_update", {"max_consecutive": 2}), ("checkpoint_now", {}), ("checkpoint_cadence", {"every": 3}),
    ("rollback", {"onset_step": 9}), ("rollback", {"onset_step": 13, "skip_batches": 2}),
    ("rollback", {"onset_step": 14, "changes": [{"action": "hold_lr", "params": {"factor": 0.5}}]}),
]  # fmt: skip
REVERTIBLE = {"hold_lr", "tighten_clip", "bf16_layers", "bf16_all", "raise_margin", "checkpoint_cadence"}
FAULTS = ("none", "slow", "fails", "unable", "damaged", "missing", "full", "cut", "disarmed")


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """What happens in one: the same for the parent, which gives the orders, and the ranks, which suffer the faults."""

    name: str
    orders: list[Order]
    faults: dict[int, str]
    cuts: list[Cut] = field(default_factory=list)


def draw(seed: int, number: int, ranks: int) -> Sequence:
    """The `number`-th sequence of a seed."""
    chance = random.Random(f"{seed}-{number}")
    name = f"s{seed}-{number}"
    orders: list[Order] = []
    step = chance.randint(3, 7)
    for index in range(1, chance.randint(2, 5) + 1):
        action, params = chance.choice(ORDERS)
        verb = "apply"
        id_ = f"{name}.{index}"
        earlier = [order.command for order in orders if order.command.action in REVERTIBLE]
        if earlier and chance.random() < 0.3:
            undone = chance.choice(earlier)
            verb, id_, action, params = "revert", undone.id, undone.action, {}
        late = {
            rank: chance.choice([step + 2, step + 5, NEVER]) for rank in range(ranks) if chance.random() < 0.15
        }  # fmt: skip
        command = Command(
            id=id_, run=name, attempt=0, term=1, sequence=index, verb=verb,  # type: ignore[arg-type]
            action=action, params=params, last_step=step + chance.choice([8, 50]), because={"onset_step": 1},
        )  # fmt: skip
        orders.append(Order(command=command, after=step, late=late, is_up_to_date=chance.random() < 0.9))
        if chance.random() < 0.1:
            orders.append(orders[-1])  # sent twice
        step += chance.randint(2, 5)
    faults = {rank: chance.choice(FAULTS) for rank in range(ranks) if chance.random() < 0.4}
    cuts = [Cut(rank=rank, at=chance.randint(4, 15)) for rank, fault in faults.items() if fault == "cut"]
    return Sequence(name=name, orders=orders, faults=faults, cuts=cuts)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=200)
    parser.add_argument("--launches", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "agreement_stress.json")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--numbers", type=int, nargs="*", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.as_rank is not None:
        return as_rank(chosen.as_rank, chosen.seed, chosen.numbers)
    rows: list[dict[str, Any]] = []
    for launch in range(chosen.launches):
        numbers = list(range(launch, chosen.sequences, chosen.launches))
        rows += play(chosen.seed, numbers, chosen.ranks)
    bad = [row for row in rows if not row["pass"]]
    carried_out = Counter(what["action"] for row in rows for what in row["log"])
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(report(rows, chosen), indent=1) + "\n")
    lags = sorted(lag for row in rows for lag in row.get("lag_steps", ()))
    if lags:
        print(f"steps from decision to carried out: median {lags[len(lags) // 2]}, largest {lags[-1]}")
    print(f"{len(rows) - len(bad)} of {len(rows)} sequences passed; carried out: {dict(sorted(carried_out.items()))}")
    for row in bad:
        print(f"  {row['name']}: {row['why']}")
    return 1 if bad or len(rows) != chosen.sequences else 0


def play(seed: int, numbers: list[int], ranks: int) -> list[dict[str, Any]]:
    """One launch."""
    sequences = [draw(seed, number, ranks) for number in numbers]
    out, sockets = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp(prefix="fp8w"))
    controller = FakeController(
        sockets / "c.sock", {s.name: s.orders for s in sequences}, {s.name: s.cuts for s in sequences}
    )  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        **os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "FP8WATCH_AGENT": controller.address,
        "FP8WATCH_DIR": str(out / "fp8watch"), "FP8WATCH_REPORT": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "agent")]),
    }  # fmt: skip
    arguments = ["--as-rank", str(out), "--seed", str(seed), "--numbers", *map(str, numbers)]
    environments = [{**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    logs = [out / f"stderr-{rank}" for rank in range(ranks)]
    processes = forked_ranks.start(Path(__file__), arguments, environments, logs)
    codes = forked_ranks.codes(processes, 60 + 20 * len(numbers))
    time.sleep(0.2)
    controller.close()
    rows = [judge(sequence, out, ranks, controller.results[sequence.name]) for sequence in sequences]
    if any(codes) or None in codes:
        said = [log.read_text()[-2000:] for log in logs]
        print(f"ranks ended with {codes}", *said, sep="\n", file=sys.stderr)
    shutil.rmtree(sockets)
    shutil.rmtree(out)
    return rows


def judge(sequence: Sequence, out: Path, ranks: int, results: list[CommandResult]) -> dict[str, Any]:
    """Whether all ranks came out of it alike."""
    row: dict[str, Any] = {"name": sequence.name, "faults": {str(k): v for k, v in sequence.faults.items()}, "log": []}
    lines: list[list[dict[str, Any]]] = []
    for rank in range(ranks):
        file = out / f"{sequence.name}-{rank}.jsonl"
        lines.append([json.loads(line) for line in file.read_text().splitlines()] if file.exists() else [])
    why = ""
    if any(not rank or "ended" not in rank[-1] for rank in lines):
        return {**row, "pass": False, "why": "a rank did not come to the end"}
    for made in zip(*(rank[:-1] for rank in lines), strict=False):
        if any(line != made[0] for line in made):
            why = why or f"ranks differ at step {made[0]['step']}"
    if len({(rank[-1]["ended"], len(rank)) for rank in lines}) > 1:
        why = why or f"they ended differently: {[(rank[-1]['ended'], len(rank)) for rank in lines]}"
    logs = [rank[-1]["log"] for rank in lines]
    if any(log != logs[0] for log in logs):
        why = why or f"they carried out different things: {logs}"
    actions = {order.command.id: order.command.action for order in sequence.orders}
    sent = {(order.command.id, order.command.verb): order for order in sequence.orders}
    lags = [
        step - order.after
        for id_, verb, step in logs[0]
        if not (order := sent[id_, verb]).late and order.is_up_to_date and step >= order.after
    ]
    row["lag_steps"] = lags
    log = [{"id": id_, "action": actions[id_], "verb": verb, "step": step} for id_, verb, step in logs[0]]
    row |= {"log": log, "ended": lines[0][-1]["ended"], "steps": len(lines[0]) - 1, "answers": len(results)}
    return {**row, "pass": not why, "why": why}


def as_rank(out: Path, seed: int, numbers: list[int]) -> int:
    """One rank's part of a launch."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for number in numbers:
        with contextlib.suppress(SystemExit):
            _train(draw(seed, number, dist.get_world_size()), out)
        dist.barrier()
    dist.destroy_process_group()
    return 0


def _train(sequence: Sequence, out: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    import fp8watch
    from fp8watch.checkpoints.checksum import parameter_checksum
    from fp8watch.emulation import DelayedScaling, convert

    rank = dist.get_rank()
    fault = sequence.faults.get(rank, "none")
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Dropout(0.2), nn.Linear(32, 16))
    convert(inner, DelayedScaling(amax_history_len=4))
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
    data = TensorDataset(torch.randn(256, 16, generator=torch.Generator().manual_seed(1)))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    torch.manual_seed(100 + rank)
    if fault == "disarmed":
        os.environ["FP8WATCH_DISARM"] = "1"
    folder = out / "saved" / sequence.name
    watch = fp8watch.attach(
        model, optimizer, lr_scheduler=scheduler, dataloader=loader, policy=ACTS, run=sequence.name,
        checkpoints=fp8watch.Checkpoints(folder, every=EVERY),
    )  # fmt: skip
    log: list[tuple[str, str, int]] = []
    _listen(watch, log)
    hurt(watch, fault, random.Random(f"{sequence.name}-{rank}"))
    ended = "end"
    with (out / f"{sequence.name}-{rank}.jsonl").open("w", buffering=1) as file:
        try:
            made = 0
            batches = watch.batches(loader)
            while made < STEPS:
                for (inputs,) in batches:
                    if made >= STEPS:
                        break
                    made += 1
                    if fault == "slow":
                        time.sleep(0.005)
                    loss = (model(inputs) - inputs).square().mean()
                    loss.backward()
                    watch.clip_grad_norm_(model.parameters(), max_norm=1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    found = parameter_checksum(inner)
                    line = {"step": watch.global_step + 1, "attempt": watch.attempt, "checksum": found}
                    file.write(json.dumps(line) + "\n")
                    watch.step(loss)
        except SystemExit as error:
            ended = f"{type(error).__name__} {error.code}"
        watch.detach()
        file.write(json.dumps({"ended": ended, "log": log}) + "\n")
    os.environ.pop("FP8WATCH_DISARM", None)


def _listen(watch: Any, log: list[tuple[str, str, int]]) -> None:
    """Write down what this rank carries out."""
    boundary = watch._boundary
    conclude = boundary._conclude

    def listening(command: Command, action: Any, did: Any, step: int) -> None:
        if did.fate.name == "DONE":
            log.append((command.id, command.verb, step))
        conclude(command, action, did, step)

    boundary._conclude = listening


def hurt(watch: Any, fault: str, chance: random.Random) -> None:
    """What goes wrong on this rank."""
    from fp8watch.checkpoints import underway
    from fp8watch.errors import ActionError

    session = watch._session
    manager = session.context.checkpoints
    if fault == "unable":
        chosen = set(chance.sample(["hold_lr", "bf16_all", "rollback", "checkpoint_now", "repair_scale"], 2))
        for name in chosen:
            session.actions[name].unavailable = lambda: "not on this rank"
    elif fault == "fails":
        name = chance.choice(["hold_lr", "tighten_clip", "bf16_layers", "bf16_all", "checkpoint_now", "raise_margin"])

        def fail(step: int, params: dict[str, Any]) -> Any:
            raise ActionError("the device said no")

        session.actions[name].apply = fail
    elif fault in ("damaged", "missing"):
        load = manager.load

        def rotten(checkpoint: str, **options: Any) -> Any:
            file = manager.root / checkpoint / f"state-{manager.rank:05d}.pt"
            if checkpoint.startswith("step-00000010") and file.exists():
                if fault == "missing":
                    file.unlink()
                else:
                    content = bytearray(file.read_bytes())
                    content[len(content) // 2] ^= 1
                    file.write_bytes(content)
            return load(checkpoint, **options)

        manager.load = rotten
    elif fault == "full":
        write_files = underway.write_files

        def full(folder: Path, files: Any) -> Any:
            if folder.parent == manager.root and any(f"step-{step:08d}" in folder.name for step in (5, 15)):
                raise OSError(errno.ENOSPC, "No space left on device")
            return write_files(folder, files)

        underway.write_files = full


def report(rows: list[dict[str, Any]], chosen: argparse.Namespace) -> dict[str, Any]:
    import torch

    command = (
        f"bench/agreement_stress.py --sequences {chosen.sequences} --launches {chosen.launches} "
        f"--ranks {chosen.ranks} --seed {chosen.seed}"
    )
    return head(command, torch=torch.__version__) | {"passed": sum(row["pass"] for row in rows), "rows": rows}


if __name__ == "__main__":
    sys.exit(main())
