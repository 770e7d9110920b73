"""Runs written into a real store, as an agent writes them: what the page must show is read back from these records."""

from __future__ import annotations

import json
import math
from contextlib import closing
from pathlib import Path

import numpy as np

from fp8watch.columns import pack
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.formats import FORMATS
from fp8watch.records import ActionRecord, Finding, Hello, Layout, RunRecord, StepFrame, TensorColumn

MODULES = ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
TENSORS = (("input", "e4m3"), ("weight", "e4m3"), ("grad_output", "e5m2"))
START_UNIX = 1_700_000_000.0


def columns(num_blocks: int) -> list[TensorColumn]:
    return [
        TensorColumn(module=f"blocks.{block}.{module}", tensor=tensor, block=str(block), fp8_format=fp8_format)
        for block in range(num_blocks)
        for module in MODULES
        for tensor, fp8_format in TENSORS
    ]


def layout(run: str, *, num_blocks: int, attempt: int = 0, rank: int = 0) -> Layout:
    count = num_blocks * len(MODULES)
    return Layout(
        run=run,
        attempt=attempt,
        rank=rank,
        layout_id=0,
        columns=columns(num_blocks),
        expected_modules=count,
        observed_modules=count,
    )


def record(run: str, *, state: str = "running", attempt: int = 0, num_blocks: int = 2, policy: str | None = None):
    hello = Hello(
        wire_version=1,
        run=run,
        attempt=attempt,
        rank=0,
        local_rank=0,
        world_size=1,
        pid=1,
        host="localhost",
        time_unix=START_UNIX,
        step=0,
        policy=policy,
        policy_name="auto" if policy else "observe",
        expected_modules=num_blocks * len(MODULES),
        observed_modules=num_blocks * len(MODULES) - 1,
    )
    return RunRecord(run=run, state=state, hello=hello, started_unix=START_UNIX, updated_unix=START_UNIX)


def frame(
    run: str,
    step: int,
    *,
    num_blocks: int,
    loss: float | None = None,
    attempt: int = 0,
    rank: int = 0,
    headroom: np.ndarray | float = 1.0,
    observed: np.ndarray | None = None,
    bf16: np.ndarray | None = None,
    bf16_modules: int = 0,
) -> StepFrame:
    """A frame whose head-room is exactly `headroom` (amax and scale are powers of two apart from the format)."""
    limits = np.array([FORMATS[column.fp8_format].max for column in columns(num_blocks)])
    scale = np.full(len(limits), 2.0**5)
    amax = limits / scale / np.exp2(np.broadcast_to(headroom, limits.shape))
    packed = {"amax": pack(amax, "f4", observed), "scale": pack(scale, "f4", observed)}
    if bf16 is not None:
        packed["high_precision"] = pack(bf16, "u1")
    scalars = {"grad_norm": 1.0, "learning_rate": 1e-3, "bf16_modules": float(bf16_modules)}
    if loss is not None:
        scalars["loss"] = loss
    return StepFrame(
        run=run,
        attempt=attempt,
        rank=rank,
        step=step,
        layout_id=0,
        time_unix=START_UNIX + step,
        scalars=scalars,
        columns=packed,
    )


def loss_at(step: int) -> float:
    return 2.0 + 2.0 * math.exp(-step / 80) + 0.02 * math.sin(step * 1.7)


def write_endpoint(root: Path, run: str, store: Path) -> None:
    folder = root / "runs" / run
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "endpoint.json").write_text(
        json.dumps({"pid": 1, "socket": "", "metrics_url": "http://127.0.0.1:9464/metrics", "store": str(store)})
    )


def write_healthy(root: Path, run: str = "healthy-run", *, steps: int = 120, num_blocks: int = 2) -> Path:
    """A run without findings that has ended; its last loss is NaN, the one before is not."""
    store = root / "runs" / run / "store.sqlite"
    write_endpoint(root, run, store)
    with closing(SqliteStore(store)) as db:
        db.append(run, [record(run, state="ended", num_blocks=num_blocks), layout(run, num_blocks=num_blocks)])
        db.append(
            run,
            [
                frame(run, step, num_blocks=num_blocks, loss=math.nan if step == steps else loss_at(step))
                for step in range(1, steps + 1)
            ],
        )
    return store


POLICY = "version: 1\nmode: auto\nrules: []\n"


def write_rescued(root: Path, run: str = "rescued-run", *, num_blocks: int = 4, steps: int = 240) -> Path:
    """A scale freezes at 151, is found at 154 and repaired at 156; at 170 the run goes back to 140 as attempt 1."""
    store = root / "runs" / run / "store.sqlite"
    write_endpoint(root, run, store)
    names = [column.name for column in columns(num_blocks)]
    bad = names.index("blocks.2.mlp.down:input")
    count = len(names)
    rng = np.random.default_rng(0)
    records: list = [record(run, attempt=1, num_blocks=num_blocks, policy=POLICY)]
    for attempt, first, last in ((0, 1, 170), (1, 141, steps)):
        records.append(layout(run, num_blocks=num_blocks, attempt=attempt))
        for step in range(first, last + 1):
            headroom = np.abs(rng.normal(1.0, 0.7, count)) + np.arange(count) % 3
            observed = np.ones(count, dtype=bool)
            observed[0] = step > 20
            bf16 = np.zeros(count, dtype=np.uint8)
            loss = loss_at(step)
            if attempt == 0 and step > 150:
                headroom[bad] = -6.0
                loss += 0.02 * (step - 150)
            if attempt == 1:
                bf16[[index for index, name in enumerate(names) if name.startswith("blocks.2.mlp.down:")]] = 1
            records.append(
                frame(
                    run,
                    step,
                    attempt=attempt,
                    num_blocks=num_blocks,
                    loss=loss,
                    headroom=headroom,
                    observed=observed,
                    bf16=bf16,
                    bf16_modules=attempt,
                )
            )
    records += [
        Finding(
            id="f1",
            run=run,
            attempt=0,
            step=154,
            onset_step=151,
            detector="scale_frozen",
            severity="act",
            cause="bookkeeping",
            tensor="blocks.2.mlp.down:input",
            layer="blocks.2.mlp.down",
            layers=["blocks.2.mlp.down"],
            evidence={"scale": 32.0, "expected_scale": 0.5, "deviation": 64.0},
            incident="i1",
        ),
        Finding(
            id="f2",
            run=run,
            attempt=0,
            step=163,
            onset_step=152,
            detector="loss_spike",
            severity="warn",
            cause="bookkeeping",
            evidence={"z": 7.25},
            incident="i1",
        ),
        ActionRecord(
            id="a1",
            run=run,
            attempt=0,
            action="repair_scale",
            params={"tensors": ["blocks.2.mlp.down:input"]},
            rule="frozen-scale",
            finding="f1",
            incident="i1",
            mode="auto",
            status="applied",
            decided_step=154,
            applied_step=156,
            reason="scale deviates 64x from what its window demands",
            readback="failed",
            outcome="no_effect",
        ),
        ActionRecord(
            id="a2",
            run=run,
            attempt=0,
            action="rollback",
            params={"checkpoint": "step-140", "skip_batches": 0},
            rule="frozen-scale",
            finding="f1",
            incident="i1",
            mode="auto",
            status="applied",
            decided_step=168,
            applied_step=170,
            reason="repair did not help",
            readback="ok",
            observed={"step": 140},
            outcome="helped",
            steps_replayed=30,
        ),
        ActionRecord(
            id="a3",
            run=run,
            attempt=1,
            action="tighten_clip",
            params={"limit": 0.5},
            rule="bursts",
            finding="f2",
            mode="observe",
            status="proposed",
            decided_step=200,
            reason="observe mode",
        ),
    ]
    with closing(SqliteStore(store)) as db:
        db.append(run, records)
    return store
