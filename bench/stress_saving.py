"""When a checkpoint is complete, counted in boundaries: between the one at which it is saved and the next.

The rank that writes the ledger checks at its boundaries whether all ranks' parts are durable, so it depends on the disk
whether it finds them at once, and how soon the others see it. Here it checks before its next step until it has found
them; all ranks make that step together, so all see the checkpoint at the next boundary. A rank that is slow to leave
the boundary of the save, and could see the checkpoint there already, does not look.
"""

from __future__ import annotations

import time
from typing import Any

from fp8watch.actions.base import Applied, ReadBack
from fp8watch.errors import CheckpointError

WAIT_SECONDS = 60.0


class Durable:
    """The rule for one rank; does nothing in a sequence by the clock."""

    def __init__(self, watch: Any, *, is_by_clock: bool) -> None:
        self._session = watch._session
        self._manager = self._session.context.checkpoints
        self._is_held = self._manager.is_writer and not is_by_clock
        self._advance = self._manager._advance
        if self._is_held:
            self._manager._advance = lambda saving: None if self._is_held else self._advance(saving)
        if not is_by_clock:
            action = self._session.actions["checkpoint_now"]
            read_back = action.read_back

            def look_later(applied: Applied) -> ReadBack:
                is_same = applied.step == self._session.step
                return ReadBack(ok=None) if is_same else read_back(applied)

            action.read_back = look_later

    def finish(self) -> None:
        """Call before a step."""
        if not self._is_held:
            return
        deadline = time.monotonic() + WAIT_SECONDS
        while self._manager._underway and time.monotonic() < deadline:
            for saving in self._manager._underway[:]:
                try:
                    self._advance(saving)
                except CheckpointError as error:
                    self._session.note(str(error))
            if self._manager._underway:
                time.sleep(0.002)

    def let_go(self) -> None:
        """Call when no step follows."""
        self._is_held = False
