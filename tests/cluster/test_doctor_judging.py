"""`fp8watch doctor --cluster` names a run whose frames arrive and are not judged, and no other."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import hand_made as make
import msgspec
import numpy as np
import pytest
from test_doctor_cluster import doctor

from fp8watch import wire
from fp8watch.columns import pack
from fp8watch.commands.doctor_feeding import SETTLED_SECONDS
from fp8watch.controller.cluster import contest
from fp8watch.controller.cluster.redis_keys import ACTIVE, RunKeys
from fp8watch.controller.stores.redis import RedisStore
from fp8watch.records import NodeFrame, RunRecord
from fp8watch.security.envelope import Sealer

pytestmark = pytest.mark.redis
KEYS = RunKeys("r")


def feed(
    store: RedisStore, step: int, *, attempt: int = 0, seconds_ago: float = SETTLED_SECONDS + 2, **more: Any
) -> None:  # fmt: skip
    frame = NodeFrame(
        run="r", attempt=attempt, node="n0", rank=0, step=step, layout_id=1, time_unix=time.time(), ranks=[0],
        scalars=[{"loss": 2.0}], **more,
    )  # fmt: skip
    entry = msgspec.msgpack.encode(Sealer("n0", 1, None).seal(wire.pack(frame)))
    entry_id = f"{int((time.time() - seconds_ago) * 1000)}-*"
    store.link.client.xadd(KEYS.frames, {"k": "n", "e": entry}, id=entry_id)
    store.link.client.sadd(ACTIVE, "r")


def record(store: RedisStore, step: int, *, seconds_ago: float = 1.0, state: Any = "running", **hello: Any) -> None:
    now = time.time()
    made = RunRecord(
        run="r", state=state, hello=make.hello("r", **hello), started_unix=now - 900, updated_unix=now - seconds_ago,
        last_step=step,
    )  # fmt: skip
    store.append("r", [made])


def said(store: RedisStore) -> str:
    path = store.link.client.connection_pool.connection_kwargs["path"]
    result, words = doctor(f"unix://{path}")[1].get("run r", ("ok", ""))
    assert result == ("problem" if words else "ok")
    return words


def test_a_run_that_is_judged_is_no_problem(store: RedisStore) -> None:
    for step, seconds_ago in ((7, 50.0), (8, 40.0), (9, 0.5)):
        feed(store, step, seconds_ago=seconds_ago)
    record(store, 8, seconds_ago=38.0)
    assert said(store) == "", "step 9 has just come"


def test_a_run_that_has_ended_is_no_problem(store: RedisStore) -> None:
    feed(store, 8, seconds_ago=40.0)
    record(store, 8, seconds_ago=38.0, state="ended")
    assert said(store) == ""


def test_a_run_without_frames_is_no_problem(store: RedisStore) -> None:
    store.link.client.sadd(ACTIVE, "r")
    assert said(store) == ""


@pytest.mark.parametrize(
    ("fed", "known", "words"),
    [
        ({"step": 8}, None, "no controller knows the run"),
        ({"step": 860, "attempt": 1}, {"step": 55}, "of attempt 1 came, the record is at step 55 of attempt 0"),
        ({"step": 860}, {"step": 55}, "step 860 of attempt 0 came, the record is at step 55"),
        ({"step": 20}, {"step": 55, "seconds_ago": 400.0}, "step 20 of attempt 0 came"),
        ({"step": 20}, {"step": 55, "attempt": 3, "seconds_ago": 400.0}, "step 20 of attempt 0 came"),
        ({"step": 60}, {"step": 55, "state": "ended", "seconds_ago": 400.0}, "it is ended since step 55"),
    ],
)  # fmt: skip
def test_a_run_that_is_fed_and_not_judged_is_named(
    store: RedisStore, fed: dict[str, Any], known: dict[str, Any] | None, words: str
) -> None:
    feed(store, **fed)
    if known is not None:
        record(store, **known)
    found = said(store)
    assert "node n0 sends frames of it and they are not judged" in found
    assert words in found


def test_a_run_whose_tensors_are_not_known_is_named(store: RedisStore) -> None:
    feed(store, 8, columns={"amax": pack(np.ones(6, dtype=np.float32), "f4")})
    record(store, 8)
    assert "which tensors it reports is not known" in said(store)
    store.append("r", [make.layout("r")])
    assert said(store) == ""


def test_a_node_that_is_refused_is_named_once(store: RedisStore) -> None:
    feed(store, 860)
    record(store, 55)
    note = contest.encode(contest.Contest(holder="n9"))
    store.link.client.set(KEYS.contested("n0"), note)
    assert said(store) == "", "said where all refused nodes are"


def test_what_anybody_may_have_written_does_not_stop_it(store: RedisStore, tmp_path: Path) -> None:
    old = int((time.time() - 40) * 1000)
    for number, fields in enumerate(({"x": "y"}, {"k": "n"}, {"k": "n", "e": b"\xff"}, {"k": "n", "e": b"\x80"})):
        store.link.client.xadd(KEYS.frames, fields, id=f"{old}-{1 + number}")  # type: ignore[arg-type]
    store.link.client.sadd(ACTIVE, "r", b"\xff")
    assert said(store) == ""
