"""Damaged bytes at every decoder, and what still decodes at the controllers: a little of bench/fuzz_wire.py."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from bench import fuzz_wire
from fp8watch import wire
from fp8watch.controller.stores.base import Approval, unpack_approval
from fp8watch.controller.stores.sqlite import SqliteStore
from fp8watch.errors import WireError
from fp8watch.security.envelope import unpack

INPUTS = 3000
DEEP = b"\x81\xa1?" + b"\x91" * 5000
"""A map whose one field nobody knows and that is nested deeper than any recursion limit."""
DECODERS = [
    wire.unpack_message, wire.unpack_reply, wire.unpack_uplink, wire.unpack_stored, unpack, unpack_approval,
]  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_but_a_wire_error_comes_out_of_damaged_bytes(seed: int) -> None:
    decoding, messages, uplinks = fuzz_wire.fuzz_decoders(random.Random(seed), INPUTS // 2, keep=INPUTS)
    assert decoding["failures"] == {}
    assert decoding["pass"]
    assert len(messages) > 50
    assert len(uplinks) > 50
    with np.errstate(all="ignore"):  # a NaN that signals, made wider, is worth a warning of NumPy's
        for row in (fuzz_wire.fuzz_controller(messages), fuzz_wire.fuzz_cluster(uplinks)):
            assert row["failures"] == {}
            assert row["pass"]


@pytest.mark.parametrize("decode", DECODERS, ids=lambda decode: decode.__qualname__)
def test_nesting_in_a_field_that_nobody_knows_is_refused(decode: object) -> None:
    assert callable(decode)
    with pytest.raises(WireError):
        decode(DEEP)


def test_a_verdict_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a.sqlite")
    for action in ("a", "b"):
        store.approve(Approval(run="r", action_id=action, verdict="approve"))
    for damage in (DEEP, b"", b"\xc1", msgspec.msgpack.encode({"run": "r"})):
        store._db.execute("UPDATE approvals SET body = ? WHERE action_id = 'a'", (damage,))
        assert [item.action_id for item in store.approvals("r")] == ["b"]
    store.close()
