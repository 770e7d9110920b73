#!/usr/bin/env python3
"""Damage logs of every kind that replay reads, line by line, and check that each is read or refused, never worse.

    python bench/replay_fuzz.py [--lines 100000] [--seed 0]

Read: exit code 0. Refused: exit code 2 and nothing on standard error but `file:line: field: reason` (and notes). Never:
an exception, a detector that failed, output that is not JSON, an unknown step.
Writes bench/results/replay_fuzz.json.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from fp8watch.replay.recording import NOTE
from fp8watch.replay.run import replay

OUT = Path(__file__).parent / "results" / "replay_fuzz.json"
LINES = 60
"""Lines per log."""
MUTATED = (1, 2, 4, 16)
"""How many lines are damaged in a log: one of these numbers."""

Rng = random.Random
NUMBERS = (
    "nan", "NaN", "-nan", "inf", "-inf", "Infinity", "1e999", "-1e999", "1e308", "1e-320", "0", "-0.0", "-1", "",
    "9" * 25, "9" * 5000, "1_0", "0x10", "1,5", "1.2.3", "--1", "e5", "None", "null", "true", "\u0661\u0662", "\uff11",
    "3.0f", "1e", "+", " ", "\t", "\x00", "1\x002", '"', "'", "\ufeff", "\u2028", "{}", "[1]", "|", ":",
)  # fmt: skip
"""What is put where a number should be."""
EXTREMES = (
    "NaN", "Infinity", "-Infinity", "1e308", "-1e308", "1.7976931348623157e308", "5e-324", "-5e-324", "0", "-1", "3",
    "9007199254740993", "1e-320", "100000",
)  # fmt: skip
"""Numbers that every reader accepts as such."""
RAW = (b"\xff\xfe", b"\xc3\x28", b"\x00", b"\r", b"\x1b[31m", b"\xed\xa0\x80", b'"', b"\\", b"\x0b", b"\x85", b"\x1c")


def csv_text(rng: Rng) -> list[bytes]:
    rows = [f"{i},{3 + rng.gauss(0, 0.03):.4f},{rng.lognormvariate(0, 0.2):.4f},1e-3" for i in range(1, LINES)]
    return [line.encode() for line in ("step,loss,grad_norm,lr", *rows)]


def megatron_text(rng: Rng) -> list[bytes]:
    return [
        (
            f" [2025-01-01 00:00:00] iteration {i:8d}/  100000 | consumed samples: {i * 64} | learning rate: 1.0E-04 |"
            f" global batch size: 64 | lm loss: {3 + rng.gauss(0, 0.03):.6E} | loss scale: 1.0 |"
            f" grad norm: {rng.lognormvariate(0, 0.2):.3f} | number of skipped iterations: 0 |"
            f" number of nan iterations: 0 |"
        ).encode()
        for i in range(1, LINES + 1)
    ]


def torchtitan_text(rng: Rng) -> list[bytes]:
    return [
        (
            f"[rank0]:[titan] 2025-01-01 00:00:00,000 - root - INFO - \x1b[31mstep: {i:2}  \x1b[32mloss: "
            f"{3 + rng.gauss(0, 0.03):7.4f}  \x1b[33mgrad_norm: {rng.lognormvariate(0, 0.2):.4f}  memory: 1.2GiB(1%)"
        ).encode()
        for i in range(1, LINES + 1)
    ]


def trainer_state_text(rng: Rng) -> list[bytes]:
    entries = [
        {"step": i, "loss": 3 + rng.gauss(0, 0.03), "grad_norm": rng.lognormvariate(0, 0.2), "learning_rate": 1e-4}
        for i in range(1, LINES + 1)
    ]
    return json.dumps({"log_history": entries, "global_step": LINES}, indent=0).encode().split(b"\n")


def nemo_text(rng: Rng) -> list[bytes]:
    return [
        (
            f"Training epoch 0, iteration {i}/99 | lr: 1.4e-05 | global_batch_size: 8 | global_step: {i} | "
            f"reduced_train_loss: {3 + rng.gauss(0, 0.03):.4f} | train_step_timing in s: 0.5"
        ).encode()
        for i in range(1, LINES + 1)
    ]


def wandb_text(rng: Rng) -> list[bytes]:
    rows = [
        {"_step": i, "train/loss": 3 + rng.gauss(0, 0.03), "train/grad_norm": rng.lognormvariate(0, 0.2), "epoch": 0}
        for i in range(1, LINES + 1)
    ]
    return [json.dumps(row).encode() for row in rows]


KINDS: dict[str, Callable[[Rng], list[bytes]]] = {
    "run.csv": csv_text, "megatron.log": megatron_text, "torchtitan.txt": torchtitan_text,
    "trainer_state.json": trainer_state_text, "wandb-history.jsonl": wandb_text, "nemo.log": nemo_text,
}  # fmt: skip
"""File name -> a function that makes a sound log."""


def _number(line: bytes, rng: Rng, numbers: Sequence[str] = NUMBERS) -> bytes:
    spots = list(re.finditer(rb"[-+0-9.][-+0-9.eE]*", line))
    if not spots:
        return line
    spot = rng.choice(spots)
    return line[: spot.start()] + rng.choice(numbers).encode() + line[spot.end() :]


def _extreme(line: bytes, rng: Rng) -> bytes:
    return _number(line, rng, EXTREMES)


def _bytes(line: bytes, rng: Rng) -> bytes:
    place = rng.randint(0, len(line))
    return line[:place] + rng.choice(RAW) * rng.randint(1, 3) + line[place + rng.randint(0, 3) :]


def _cut(line: bytes, rng: Rng) -> bytes:
    return line[: rng.randint(0, len(line))]


def _shuffle(line: bytes, rng: Rng) -> bytes:
    parts = re.split(rb"([,|:]| +)", line)
    rng.shuffle(parts)
    return b"".join(parts)


def _noise(line: bytes, rng: Rng) -> bytes:
    return rng.randbytes(rng.randint(0, 40))


def _long(line: bytes, rng: Rng) -> bytes:
    return line + b"x," * rng.choice((200, 70_000))


CHANGES: tuple[Callable[[bytes, Rng], bytes], ...] = (
    *[_extreme] * 8, _number, _number, _bytes, _bytes, _cut, _shuffle, _noise, _long,
)  # fmt: skip


def mutate(lines: Sequence[bytes], rng: Rng, *, count: int) -> bytes:
    """A damaged copy: `count` lines changed, then lines repeated, swapped or left out."""
    damaged = list(lines)
    for place in rng.sample(range(len(damaged)), min(count, len(damaged))):
        damaged[place] = rng.choice(CHANGES)(damaged[place], rng)
    for _ in range(rng.randint(0, 4)):
        place, other = rng.randrange(len(damaged)), rng.randrange(len(damaged))
        match rng.randrange(3):
            case 0:
                damaged.insert(place, damaged[other])
            case 1:
                damaged[place], damaged[other] = damaged[other], damaged[place]
            case _:
                del damaged[place : place + rng.randint(1, 5)]
                damaged = damaged or [b""]
    return rng.choice((b"\n", b"\n", b"\r\n")).join(damaged) + rng.choice((b"", b"\n"))


class _Failures(logging.Handler):
    """Collects log messages about failed detectors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


def check(path: Path) -> int:
    """Replay a file; returns its exit code. Raises `AssertionError` for whatever the module's docstring rules out."""
    out, err, failures = io.StringIO(), io.StringIO(), _Failures()
    logger = logging.getLogger("fp8watch")
    logger.addHandler(failures)
    try:
        code = replay([path], out=out, err=err)
    finally:
        logger.removeHandler(failures)
    assert not failures.seen, failures.seen
    refusal = re.compile(re.escape(str(path)) + r":\d+: [^:\n]+: .+")
    said = [line for line in err.getvalue().split("\n") if line and not line.startswith(NOTE)]
    assert all(refusal.fullmatch(line) for line in said), said
    assert (code == 2) == bool(said), (code, said)
    assert code in (0, 2), code
    for line in out.getvalue().splitlines():
        assert json.loads(line)["step"] >= 0
    return code


def main() -> int:
    import detection_result
    from result_head import as_text

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    logging.getLogger("fp8watch").propagate = False
    codes: Counter[str] = Counter()
    damaged = 0
    with tempfile.TemporaryDirectory(prefix="fp8watch-fuzz-") as folder:
        for case in range(chosen.lines):
            rng = Rng(f"{chosen.seed} {case}")
            count = rng.choice(MUTATED)
            name = list(KINDS)[case % len(KINDS)]
            path = Path(folder, name)
            path.write_bytes(mutate(KINDS[name](rng), rng, count=count))
            try:
                codes[f"{name}: {'read' if check(path) == 0 else 'refused'}"] += 1
            except Exception as error:
                raise SystemExit(f"case {case} of seed {chosen.seed} ({name}): {error!r}") from error
            damaged += count
            if damaged >= chosen.lines:
                break
    row = {
        "name": "mutated log lines",
        "lines": damaged,
        "files": dict(codes),
        "bar": "no traceback",
        "pass": True,
    }
    print(row)
    command = " ".join(["bench/replay_fuzz.py", *sys.argv[1:]])
    OUT.write_text(as_text(detection_result.header(command) | {"rows": [row]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
