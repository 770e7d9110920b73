"""The one place where failures of fp8watch stop, so that none reaches training.

Every entry point that training code or a framework's hook calls goes through a `Guard`. It counts what failed
by part, says the first failure with its traceback, and stops calling a part that failed several times in a row.
`Halted`, `KeyboardInterrupt` and the like are no `Exception` and pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

FAILURES_TO_DISABLE = 3
"""Failures in a row after which a part is left out for the rest of the run: one may be a passing condition (a
full disk, a module in an odd state), three in a row are a fault, and each costs time on the training thread."""


class Guard:
    """Counts failures by part and keeps them away from training."""

    def __init__(self, limit: int = FAILURES_TO_DISABLE) -> None:
        self._limit = limit
        self._in_a_row: dict[str, int] = {}
        self._said: set[str] = set()
        self.failures: dict[str, int] = {}
        """Failures of each part since attach."""
        self.disabled: dict[str, str] = {}
        """Part -> last error, for parts that are not called any more."""

    def call(self, part: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """`function(*args, **kwargs)`, or None when it failed or the part is disabled."""
        if part in self.disabled:
            return None
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            self.failed(part, error)
            return None
        if self._in_a_row:
            self._in_a_row.pop(part, None)
        return result

    def is_failing(self, part: str) -> bool:
        """Whether the last call of a part failed, or it is not called any more."""
        return part in self._in_a_row

    def off(self) -> list[tuple[str, str]]:
        """Parts that are not called any more, and why: what the layout says of them."""
        text = "off for the rest of this run after {} failures in a row ({})"
        return [(part, text.format(self._in_a_row.get(part, self._limit), why)) for part, why in self.disabled.items()]

    def failed(self, part: str, error: BaseException) -> None:
        """Count a failure of a part; say the first one, and the end of the part when it is one too many."""
        self.failures[part] = self.failures.get(part, 0) + 1
        in_a_row = self._in_a_row[part] = self._in_a_row.get(part, 0) + 1
        if in_a_row >= self._limit:
            self.disabled[part] = f"{type(error).__name__}: {error}"
            logger.warning(
                "fp8watch: %s failed %d times in a row and is off for the rest of this run (%s: %s); "
                "training is not affected",
                part, in_a_row, type(error).__name__, error,
            )  # fmt: skip
        elif part not in self._said:
            logger.warning("fp8watch: %s failed; training is not affected", part, exc_info=error)
        self._said.add(part)
