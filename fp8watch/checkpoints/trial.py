"""Counts starts from the same checkpoint, so that one that ends the process each time is not tried for ever."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from fp8watch.atomic_file import replace_file

logger = logging.getLogger(__name__)

MAX_TRIALS = 2
"""Starts without a step from the same checkpoint. The first may have failed because of the node; a third is not
tried."""
NAME = ".trial.json"


class _Trials(msgspec.Struct, frozen=True, kw_only=True):
    checkpoint: str
    times: int


class Trial:
    """The count, in a file beside the ledger."""

    def __init__(self, root: Path) -> None:
        self._path = root / NAME
        self._is_open = False

    def begin(self, checkpoint: str) -> bool:
        """Record that the checkpoint is about to be loaded. False: too often. If the file cannot be written, the start
        is not counted."""
        known = self._read()
        times = known.times + 1 if known is not None and known.checkpoint == checkpoint else 1
        if times > MAX_TRIALS:
            return False
        self._is_open = True
        try:
            replace_file(self._path, msgspec.json.encode(_Trials(checkpoint=checkpoint, times=times)), durable=True)
        except OSError as error:
            logger.warning("fp8watch: %s cannot be written: %s", self._path, error)
        return True

    def passed(self) -> None:
        """A step was made: reset the count."""
        if self._is_open:
            self._is_open = False
            self._path.unlink(missing_ok=True)

    def _read(self) -> _Trials | None:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Trials)
        except (OSError, msgspec.DecodeError):
            return None
