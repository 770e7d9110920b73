"""Steps of a log with an empty loss: `"loss": null`, an empty cell, a line without one.

Writers without NaN (JSON in most languages, pandas' `to_csv`) write null or nothing instead. That looks like a value
that was not logged, so nothing is found in such a step, but a note says how many there are.

A row of an evaluation rightly has no training loss, in a log that gives evaluations rows of their own.
"""

from __future__ import annotations

import re

_EVALUATION = re.compile(r"(?:^|[^a-z])(?:eval|evaluation|val|valid|validation|test)(?:$|[^a-z])", re.IGNORECASE)


def is_of_evaluation(name: str) -> bool:
    """Whether a column or key is a score of an evaluation (`eval_loss`, `val/acc`, `validation loss`)."""
    return _EVALUATION.search(name) is not None


class WithoutLoss:
    """Counts steps with an empty loss, row by row."""

    def __init__(self) -> None:
        self._step = -1
        self._has_loss = False
        self._where = ""
        """First row of the step whose loss is empty."""
        self._is_evaluation = False
        """Whether all such rows of the step are of evaluations."""
        self._count = self._of_evaluations = 0
        self._first = self._first_of_evaluations = ""
        self._is_loss_beside_scores = False
        """Whether some row has both a loss and scores: then evaluations have no rows of their own in this log."""

    def row(self, step: int, where: str, *, has_loss: bool, is_empty: bool, has_scores: bool = False) -> None:
        """Add the next row, at `where` (`file:line`). `is_empty`: its loss is empty; `has_scores`: it has scores of an
        evaluation."""
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
        """The note at the end of the log, if any. `how`: what the log has in place of the loss; `why`: the reason."""
        self._settle()
        self._where = ""
        count, first = self._count, self._first
        if self._is_loss_beside_scores and self._of_evaluations:
            count, first = count + self._of_evaluations, first or self._first_of_evaluations
        if not count:
            return None
        steps = "1 step has" if count == 1 else f"{count} steps have"
        reason = why or "a NaN may have been written like this, which cannot be told"
        return f"{first}: loss: {steps} no loss ({how}){', the first here' if count > 1 else ''}: {reason}"
