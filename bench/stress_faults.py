"""What goes wrong on a rank in a sequence of `agreement_stress.py`."""

from __future__ import annotations

import errno
import random
import time
from pathlib import Path
from typing import Any

from fp8watch.checkpoints import underway
from fp8watch.checkpoints.place import Place
from fp8watch.errors import ActionError

FULL_AT = (5, 15)
"""Steps at which nothing can be saved, because the disk is full."""
SPOILT = "step-00000010"
OTHERS_SECONDS = 3.0
"""Longest time for which the first rank's disk is full: until the others have written their parts."""


def hurt(watch: Any, fault: str, name: str) -> None:
    """Inject this rank's fault. `name`: that of the sequence; it seeds what is left to chance."""
    session = watch._session
    manager = session.context.checkpoints
    chance = random.Random(f"{name}-{manager.rank}")
    if fault == "unable":
        for action in set(chance.sample(["hold_lr", "bf16_all", "rollback", "checkpoint_now", "repair_scale"], 2)):
            session.actions[action].unavailable = lambda: "not on this rank"
    elif fault == "fails":
        able = ["hold_lr", "tighten_clip", "bf16_layers", "bf16_all", "checkpoint_now", "raise_margin"]
        session.actions[chance.choice(able)].apply = _fail
    elif fault in ("damaged", "missing"):
        _spoil_before_it_is_read(session.actions["rollback"], manager, is_missing=fault == "missing")
    elif fault == "full":
        _fill_up(manager)


def _fail(step: int, params: dict[str, Any]) -> Any:
    raise ActionError("the device said no")


def _spoil_before_it_is_read(rollback: Any, manager: Any, *, is_missing: bool) -> None:
    """Do it before this rank answers the first question of a rollback, after which all of them read."""
    choose, spoilt = rollback.choose, set[str]()

    def choosing(step: int, params: dict[str, Any], ask: Any) -> None:
        for folder in manager.root.glob(f"{SPOILT}*"):
            file = folder / f"state-{manager.rank:05d}.pt"
            if folder.name not in spoilt and file.exists():
                spoilt.add(folder.name)
                _spoil(file, is_missing=is_missing)
        choose(step, params, ask)

    rollback.choose = choosing


def _spoil(file: Path, *, is_missing: bool) -> None:
    if is_missing:
        file.unlink()
        return
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _fill_up(manager: Any) -> None:
    write_files = underway.write_files

    def full(folder: Path, *given: Any, **named: Any) -> Any:
        if folder.parent == manager.root and any(f"step-{step:08d}" in folder.name for step in FULL_AT):
            if manager.is_writer:  # it removes the folder, also from under a rank that is still writing
                _await_others(folder, manager)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_files(folder, *given, **named)

    underway.write_files = full


def _await_others(folder: Path, manager: Any) -> None:
    deadline = time.monotonic() + OTHERS_SECONDS
    ranks = [Place(rank=rank, world_size=manager.world_size) for rank in range(1, manager.world_size)]
    while not all((folder / place.part_file).exists() for place in ranks) and time.monotonic() < deadline:
        time.sleep(0.002)
