"""Throw damaged bytes at everything that reads a wire: a million inputs, none of which may end a process.

    python bench/fuzz_wire.py [--inputs 1000000] [--deep 50000] [--seed 0]

Valid records of every kind are cut, spliced, bit-flipped and given other values. They are fed as bodies to the four
decoders, as entries of an agent or a console to theirs, and as streams to the splitter; these may raise `WireError` and
nothing else. What still decodes is passed on (`--deep` of it): to a controller and an exporter's state, as from a rank
that sends garbage, and to a cluster's controller and the readers of its frames, as from an agent that does. Between
them a sound rank of the same run (for the cluster: a sound run) trains, and all of its steps must be seen. Writes
bench/results/fuzz_wire.json and exits with 1 on a failure.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import random
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from fp8watch import columns, records, wire
from fp8watch.controller.cluster.runs import ClusterController
from fp8watch.controller.service import RunController
from fp8watch.controller.stores.base import Approval, unpack_approval
from fp8watch.controller.stores.memory import MemoryStore
from fp8watch.controller.stores.redis import frames_of
from fp8watch.errors import WireError
from fp8watch.security import KeyRing
from fp8watch.security import envelope as envelopes
from fp8watch.security.envelope import Opener, Sealer
from fp8watch_agent.metrics_state import MetricsState

OUT = Path(__file__).parent / "results" / "fuzz_wire.json"
MARKS = (
    b"\x00",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\xc1",
    b"\xdd\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xcb\x7f\xf8" + b"\0" * 6,
)
"""Bytes with a meaning in msgpack: the unused type, huge lengths, a NaN."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--deep", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args()
    logging.disable(logging.CRITICAL)
    rng = random.Random(chosen.seed)
    started = time.perf_counter()
    decoding, messages, uplinks = fuzz_decoders(rng, chosen.inputs, keep=chosen.deep)
    rows = [decoding, fuzz_controller(messages), fuzz_cluster(uplinks)]
    from result_head import as_text, head  # a script beside this one; tests import this file as part of `bench`

    report = head(msgspec=msgspec.__version__) | {
        "seconds": round(time.perf_counter() - started, 1),
        "rows": rows,
    }
    chosen.out.write_text(as_text(report))
    print(json.dumps(report["rows"], indent=1))
    return 0 if all(row["pass"] for row in rows) else 1


def samples() -> list[records.Record]:
    """A sound record of every kind that crosses a wire or is stored."""
    return [hello(1), layout(1), frame(1, 7), *others()]


def hello(rank: int) -> records.Hello:
    return records.Hello(
        wire_version=wire.WIRE_VERSION, run="r", attempt=0, rank=rank, local_rank=rank, world_size=2, pid=10 + rank,
        host="h", time_unix=1.0, step=0, capabilities={"halt": ""}, warmup_steps=10,
    )  # fmt: skip


def layout(rank: int) -> records.Layout:
    tensors = [
        records.TensorColumn(module=f"blocks.{i}.up", tensor="input", block=str(i), fp8_format="E4M3", history_len=16)
        for i in range(4)
    ]
    return records.Layout(
        run="r", attempt=0, rank=rank, layout_id=1, columns=tensors, expected_modules=4, observed_modules=4
    )


def frame(rank: int, step: int) -> records.StepFrame:
    amax = np.full(4, 1.5, dtype=np.float32)
    counts = np.full(4, 100, dtype=np.uint64)
    packed = {
        "amax": columns.pack(amax, "f4"), "scale": columns.pack(448 / amax, "f4"), 
        "quantized": columns.pack(counts, "u8"), "saturated": columns.pack(counts * 0, "u8"),
    }  # fmt: skip
    scalars = {"loss": 2.0, "grad_norm": 1.0, "learning_rate": 1e-3, "step_seconds": 0.1, "tokens": 512.0}
    return records.StepFrame(
        run="r", attempt=0, rank=rank, step=step, layout_id=1, time_unix=float(step), scalars=scalars, columns=packed
    )


def others() -> list[records.Record]:
    return [
        records.CheckpointRecord(run="r", attempt=0, checkpoint="c", step=5, path="/c", label="pending"),
        records.CommandResult(id="a", run="r", attempt=0, rank=1, verb="apply", step=5, status="applied"),
        records.Evaluation(run="r", attempt=0, step=5, scores={"task": 0.5}),
        records.Goodbye(run="r", rank=1, step=9),
        records.Welcome(wire_version=wire.WIRE_VERSION, run="r", term=1),
        records.Command(
            id="a", run="r", attempt=0, term=1, sequence=1, verb="apply", action="halt", params={"x": [1]}, last_step=9
        ),
        records.LedgerUpdate(run="r", checkpoint="c", label="good"),
        records.Finding(
            id="f", run="r", attempt=0, step=5, onset_step=4, detector="loss_spike", severity="act", cause="data"
        ),
        records.ActionRecord(
            id="a", run="r", attempt=0, action="halt", params={}, rule="x", finding="f", decided_step=5
        ),
        records.RunRecord(run="r", state="running", hello=hello(1), started_unix=0.0, updated_unix=1.0),
        node_frame(1, 7),
        records.RankLost(run="r", rank=1, node="n1"),
    ]


def node_frame(rank: int, step: int) -> records.NodeFrame:
    """A node's step with one rank, as its agent reduces it."""
    alone = frame(rank, step)
    return records.NodeFrame(
        run="r", attempt=0, node=f"n{rank}", rank=rank, step=step, layout_id=1, time_unix=float(step), ranks=[rank],
        scalars=[alone.scalars], columns=alone.columns,
    )  # fmt: skip


HOSTILE = (
    None, True, -1, 0, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, float("nan"), float("inf"), -float("inf"), -0.0, 5e-324,
    "", "r", "loss", "\0", "x" * 5000, "../../etc/passwd", b"", b"\xff" * 33, [], {}, [[]], {"a": {"b": {}}},
)  # fmt: skip
"""Values that decode and make no sense."""


def mutate_values(rng: random.Random, trees: list[object]) -> bytes:
    """A sound record with one to three values replaced by hostile ones, encoded correctly."""
    tree = msgspec.msgpack.decode(msgspec.msgpack.encode(rng.choice(trees)))
    for _ in range(rng.randrange(1, 4)):
        node = tree
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.8:
                node = node[key]
                continue
            alike = [value for value in HOSTILE if type(value) is type(node[key])]
            node[key] = copy.deepcopy(rng.choice(alike if alike and rng.random() < 0.8 else HOSTILE))
            break
    return msgspec.msgpack.encode(tree)


def mutate(rng: random.Random, seeds: list[bytes]) -> bytes:
    """A damaged copy of one of the seeds, or noise."""
    kind = rng.randrange(20)
    if kind == 0:
        return rng.randbytes(rng.randrange(64))
    if kind == 1:  # nested deeper than any recursion limit, bare or in an unknown field
        return rng.choice((b"", b"\x81\xa1?")) + b"\x91" * rng.randrange(1, 5000)
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(data) + 1)
        operation = rng.randrange(6)
        if operation == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif operation == 1 and data:
            data[at % len(data)] = rng.randrange(256)
        elif operation == 2:
            del data[at:]
        elif operation == 3:
            data[at:at] = rng.choice(MARKS)
        elif operation == 4:
            other = rng.choice(seeds)
            cut = rng.randrange(len(other))
            data[at : at + rng.randrange(16)] = other[cut : cut + rng.randrange(32)]
        elif at + 8 <= len(data):
            data[at : at + 8] = struct.pack(">d", rng.choice([float("nan"), float("inf"), -1.0, 1e308, 2.0**63]))
    return bytes(data)


def fuzz_decoders(
    rng: random.Random, inputs: int, *, keep: int
) -> tuple[dict[str, object], list[records.Message], list[records.Uplink]]:
    """Feed every input to every decoder. Returns the row, and up to `keep` of a rank's and an agent's messages that
    still decoded."""
    seeds = [wire.pack(record) for record in samples()]
    trees = [msgspec.msgpack.decode(seed) for seed in seeds]
    approval = Approval(run="r", action_id="a", verdict="approve", by="me", time_unix=1.0)
    strange = {"run": "r", "invented_later": [{"a": [1]}]}
    trees += [msgspec.to_builtins(approval, builtin_types=(bytes,)), strange]
    seeds += [msgspec.msgpack.encode(approval), msgspec.msgpack.encode(strange)]
    ring = KeyRing("frame", (b"k" * 32,))
    sealed = [msgspec.msgpack.encode(Sealer("node", 1, ring).seal(seed)) for seed in seeds]
    opener, opened = Opener(ring), 0
    outcomes: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    kept: dict[str, list[records.Message | records.Uplink]] = {"message": [], "uplink": []}
    readers: dict[str, Callable[[bytes], object]] = {
        "message": wire.unpack_message, "reply": wire.unpack_reply, "stored": wire.unpack_stored,
        "uplink": wire.unpack_uplink, "envelope": envelopes.unpack, "approval": unpack_approval,
        "stream": lambda body: list(wire.Splitter().feed(body)),
    }  # fmt: skip
    for number in range(inputs):
        body = mutate(rng, seeds) if number % 2 else mutate_values(rng, trees)
        for name, reader in readers.items():
            try:
                found = reader(body)
            except WireError:
                outcomes[f"{name} refused"] += 1
            except Exception as error:
                failures[f"{name}: {type(error).__name__}: {error}"[:120]] += 1
            else:
                outcomes[f"{name} read"] += 1
                if name in kept and len(kept[name]) < keep:
                    kept[name].append(found)  # type: ignore[arg-type]
        if number % 4 == 0:
            try:
                opener.open(envelopes.unpack(mutate(rng, sealed)))
                opened += 1
            except WireError:
                outcomes["entry refused"] += 1
            except Exception as error:
                failures[f"entry: {type(error).__name__}: {error}"[:120]] += 1
    # Each sealed body opens once if a mutation left it whole, or changed nothing that the seal covers.
    row: dict[str, object] = {
        "name": "decoders", "inputs": inputs, "outcomes": dict(outcomes), "envelopes_opened": opened,
        "failures": dict(failures), "pass": not failures and opened <= len(sealed),
    }  # fmt: skip
    return row, kept["message"], kept["uplink"]  # type: ignore[return-value]


def fuzz_controller(garbage: list[records.Message]) -> dict[str, object]:
    """Garbage from one rank, with a sound rank training beside it."""
    metrics = MetricsState(
        clock=time.monotonic, series_budget=500, worst_layers=5, ended_ttl_seconds=60.0, mode_of=lambda _: "observe"
    )
    store = MemoryStore()
    controller = RunController(store, clock=time.time)
    failures: Counter[str] = Counter()
    refused: Counter[str] = Counter()

    def give(message: records.Message) -> None:
        for name, take in (("exporter", metrics.observe), ("controller", controller.receive)):
            try:
                take(message)
            except WireError:  # counted as malformed by the session that calls them
                refused[name] += 1
            except Exception as error:
                failures[f"{name}: {type(message).__name__}: {type(error).__name__}: {error}"[:160]] += 1

    give(hello(0))
    give(layout(0))
    steps = 0
    for number, message in enumerate(garbage):
        if message.run == "r" and getattr(message, "rank", 1) == 1:  # the socket's server passes nothing else on
            give(message)
        if number % 50 == 0:
            steps += 1
            give(frame(0, steps))
    seen = sum(f.rank == 0 for f in store.read("r", records.StepFrame))
    return {
        "name": "controller and exporter", "inputs": len(garbage), "sound_frames": steps, "sound_frames_stored": seen,
        "refused": dict(refused),
        "failures": dict(failures), "pass": not failures and seen == steps,
    }  # fmt: skip


def fuzz_cluster(garbage: list[records.Uplink]) -> dict[str, object]:
    """Garbage from one agent, with a sound run beside it; and its frames as console and command line read them."""
    store = MemoryStore()
    controller = ClusterController(store, clock=time.time)
    sealer = Sealer("n1", 1, None)
    failures: Counter[str] = Counter()
    refused = 0

    def give(message: records.Uplink) -> None:
        nonlocal refused
        try:
            controller.take(message)
        except WireError:
            refused += 1
        except Exception as error:
            failures[f"controller: {type(message).__name__}: {type(error).__name__}: {error}"[:160]] += 1

    give(hello(0))
    give(layout(0))
    give(msgspec.structs.replace(hello(0), run="sound", world_size=1))
    give(msgspec.structs.replace(layout(0), run="sound"))
    steps = 0
    for number, message in enumerate(garbage):
        if message.run == "r":
            give(message)
        try:
            frames_of({b"k": b"n", b"e": msgspec.msgpack.encode(sealer.seal(wire.pack(message)))})
        except Exception as error:
            failures[f"reader: {type(message).__name__}: {type(error).__name__}: {error}"[:160]] += 1
        if number % 50 == 0:
            steps += 1
            give(node_frame(0, steps))
            give(msgspec.structs.replace(node_frame(0, steps), run="sound"))
    pilot = controller.pilot("sound")
    judged = pilot.closed[1] if pilot is not None else 0
    return {
        "name": "cluster controller", "inputs": len(garbage), "sound_frames": steps, "sound_frames_judged": judged,
        "refused": refused, "failures": dict(failures), "pass": not failures and judged == steps,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
