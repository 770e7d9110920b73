"""Steps of a log that have a place for the loss and nothing in it: `"loss": null`, an empty cell, a line without one.

Writers that know no NaN (JSON in most languages, pandas' `to_csv`) put null or nothing in its place. It cannot be told
from a value that was not logged, so nothing is found in such a step; that there are such steps is said.

A row of an evaluation has no training loss by right, where a log gives evaluations rows of their own.
"""

from __future__ import annotations

import re

_EVALUATION = re.compile(r"(?:^|[^a-z])(?:eval|evaluation|val|valid|validation|test)(?:$|[^a-z])", re.IGNORECASE)


def is_of_evaluation(name: str) -> bool:
    """Whether a column or key is a score of an evaluation (`eval_loss`, `val/acc`, `validation loss`)."""
    return _EVALUATION.search(name) is not None


class WithoutLoss:
    """Counts them, row by row."""

    def __init__(self) -> None:
        self._step = -1
        self._has_loss = False
        self._where = ""
        """First row of the step whose loss is empty."""
        self._is_evaluation = False
        """All such rows of the step are of evaluations."""
        self._count = self._of_evaluations = 0
        self._first = self._first_of_evaluations = ""
        self._is_loss_beside_scores = False
        """Some row has both a loss and scores: this log gives evaluations no rows of their own."""

    def row(self, step: int, where: str, *, has_loss: bool, is_empty: bool, has_scores: bool = False) -> None:
        """The next row, at `file:line`. `is_empty`: it has a place for the loss, and nothing is in it; `has_scores`:
        an evaluation's."""
        if step != self._step:
            self._settle()
            self._step, self._has_loss, self._where, self._is_evaluation = step, False, "", True
        self._has_loss = self._has_loss or has_loss
        self._is_loss_beside_scores = self._is_loss_beside_scores or (has_loss and has_scores)
        if is_empty:
            self._where = self._where or where
            self._is_evaluation = self._is_evaluation and has_scores

    def _settle(self) -> None:
        if self._has_loss or not self._where:
            return
        if self._is_evaluation:
            self._of_evaluations += 1
            self._first_of_evaluations = self._first_of_evaluations or self._where
        else:
            self._count += 1
            self._first = self._first or self._where

    def remark(self, how: str, why: str = "") -> str | None:
        """What is to be said at the end of the log; None: nothing. `how`: what stands there, `why`: what it may be."""
        self._settle()
        self._where = ""
        count, first = self._count, self._first
        if self._is_loss_beside_scores and self._of_evaluations:
            count, first = count + self._of_evaluations, first or self._first_of_evaluations
        if not count:
            return None
        steps = "1 step has" if count == 1 else f"{count} steps have"
        reason = why or "a NaN may have been written so, which cannot be told"
        return f"{first}: loss: {steps} no loss ({how}){', the first here' if count > 1 else ''}: {reason}"
