"""The LR that the user's scheduler would set at other positions, without touching the scheduler.

A scheduler with a closed form (LambdaLR, LinearLR, cosine, SequentialLR of these, ...) is evaluated on a shallow copy,
if the result for the current position equals the live LR. Any other scheduler is deep-copied with a throw-away
optimizer and stepped, which reaches only the current and later positions. Schedulers that may have side effects are not
evaluated (`fp8watch.actions.lr_pure`).
"""

from __future__ import annotations

import copy
import math
import warnings
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler as torch_schedulers

from fp8watch.actions.lr_pure import why_not_ahead
from fp8watch.errors import ActionError

Values = tuple[float, ...]
"""One LR per parameter group."""

MAX_FORMULA_STEPS = 100_000
"""Positions searched for the end of a warm-up, for a scheduler with a closed form (0.1 s)."""
MAX_SIMULATED_STEPS = 20_000
"""The same for a scheduler that has to be stepped."""
RISE = 1e-9
"""Smallest relative increase that counts as a rise: above rounding, far below that of any warm-up."""


class LrCurve:
    """LRs of one scheduler by position. Made at attach; evaluated positions are cached."""

    def __init__(self, scheduler: Any | None, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self.unavailable: str | None = None
        """Why the schedule cannot be evaluated, or None if it can."""
        self._known: dict[int, Values] = {}
        self._warmup_steps: int | None = None
        self._formula: Callable[[int], Values] | None = None
        self._stepped: _Stepped | None = None
        if scheduler is None:
            self.unavailable = "attach got no lr_scheduler"
            return
        if not isinstance(getattr(scheduler, "last_epoch", None), int):
            self.unavailable = f"{type(scheduler).__name__} has no last_epoch"
            return
        self.unavailable = why_not_ahead(scheduler)
        if self.unavailable is not None:
            return
        try:
            self._formula = self._agreeing_formula()
            if self._formula is None:
                self._stepped = _Stepped(scheduler, optimizer)
        except Exception as error:  # a user's scheduler may raise anything
            self.unavailable = f"{type(scheduler).__name__} cannot be evaluated ahead: {type(error).__name__}: {error}"
        self._warmup_steps = self._find_warmup() if self.unavailable is None else None

    @property
    def warmup_steps(self) -> int | None:
        """Position at which the LR stops rising. None: unknown. 0: there is no warm-up."""
        return self._warmup_steps if self.unavailable is None else None

    def at(self, position: int) -> Values:
        """LR of each group at a whole position. Raises `ActionError` when it cannot be evaluated."""
        if position not in self._known:
            self._known[position] = self._evaluate(position)
        return self._known[position]

    def between(self, position: float) -> Values:
        """LR of each group at any position, interpolated linearly between whole ones."""
        lower = math.floor(position)
        share = position - lower
        if share == 0.0:
            return self.at(lower)
        return tuple(a + (b - a) * share for a, b in zip(self.at(lower), self.at(lower + 1), strict=True))

    def _evaluate(self, position: int) -> Values:
        if self.unavailable is not None:
            raise ActionError(self.unavailable)
        try:
            if self._formula is not None:
                return self._formula(position)
            assert self._stepped is not None
            return self._stepped.at(position)
        except ActionError:
            raise
        except Exception as error:
            raise ActionError(f"schedule at {position} cannot be evaluated: {type(error).__name__}: {error}") from error

    def _agreeing_formula(self) -> Callable[[int], Values] | None:
        formula = _formula(self._scheduler)
        if formula is None:
            return None
        live = [float(group["lr"]) for group in self._optimizer.param_groups]
        here = formula(self._scheduler.last_epoch)  # type: ignore[union-attr]
        agrees = len(here) == len(live) and all(
            math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-30) for a, b in zip(here, live, strict=True)
        )
        return formula if agrees else None

    def _find_warmup(self) -> int | None:
        try:
            start = 0 if self._formula is not None else self._scheduler.last_epoch  # type: ignore[union-attr]
            if start > 0:
                return None  # earlier positions cannot be evaluated
            limit = MAX_FORMULA_STEPS if self._formula is not None else MAX_SIMULATED_STEPS
            before = max(self.at(start))
            for position in range(start + 1, limit):
                after = max(self.at(position))
                if not after > before * (1 + RISE):
                    return position - 1
                before = after
        except ActionError:
            pass
        return None


def _formula(scheduler: Any) -> Callable[[int], Values] | None:
    """LRs by position from the scheduler's closed form; None if it has none."""
    if isinstance(scheduler, torch_schedulers.SequentialLR):
        inner = [_formula(part) for part in scheduler._schedulers]
        if any(part is None for part in inner):
            return None
        milestones = list(scheduler._milestones)

        def sequential(position: int) -> Values:
            index = bisect_right(milestones, position)
            formula = inner[index]
            assert formula is not None
            return formula(position - (milestones[index - 1] if index else 0))

        return sequential
    if type(scheduler) is torch_schedulers.LambdaLR:

        def lambdas(position: int) -> Values:
            pairs = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            return tuple(float(base) * float(factor(position)) for base, factor in pairs)

        return lambdas
    if hasattr(scheduler, "_get_closed_form_lr"):

        def closed(position: int) -> Values:
            twin = copy.copy(scheduler)
            twin.last_epoch = position
            return tuple(float(lr) for lr in twin._get_closed_form_lr())

        return closed
    return None


class _Stepped:
    """A copy of the scheduler on a throw-away optimizer, stepped forward as far as needed."""

    def __init__(self, scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
        live = [(group, group["lr"]) for group in optimizer.param_groups]
        position = scheduler.last_epoch
        twin = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": 0.0} for _ in live], lr=0.0)
        for group, (source, _) in zip(twin.param_groups, live, strict=True):
            copied = {key: value for key, value in source.items() if key != "params"}
            group.update(copy.deepcopy(copied))
        twin._opt_called = True  # type: ignore[attr-defined]
        if any(isinstance(value, torch.nn.Module) for value in vars(scheduler).values()):
            raise ActionError("it holds a model, which would be copied")
        self._twin = twin
        # The memo replaces the optimizer by the twin, so that neither model nor moments are copied.
        self._scheduler = copy.deepcopy(scheduler, {id(optimizer): twin})
        self._known: dict[int, Values] = {position: self._values()}
        self._newest = position
        self._advance()
        moved = scheduler.last_epoch != position or any(group["lr"] is not lr for group, lr in live)
        if moved:
            raise ActionError("its copy is tied to the live one")

    def at(self, position: int) -> Values:
        if position not in self._known and position < self._newest:
            raise ActionError(f"the schedule before position {min(self._known)} is unknown")
        while self._newest < position:
            self._advance()
        return self._known[position]

    def _advance(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the twin optimizer never steps
            self._scheduler.step()
        self._newest += 1
        self._known[self._newest] = self._values()

    def _values(self) -> Values:
        return tuple(float(group["lr"]) for group in self._twin.param_groups)
