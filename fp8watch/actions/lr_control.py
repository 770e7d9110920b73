"""The LR rules in force: applied to the parameter groups around `optimizer.step`, the original LRs restored after it.

Between steps the groups hold the same objects that the user's scheduler put there, so checkpoints and schedulers never
see the change. The core calls `enter` right before the real `optimizer.step` and `leave` in a `finally`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fp8watch.actions.lr_rules import Lr, LrRule
from fp8watch.actions.lr_seen import SeenCurve


class LrControl:
    """The LR rules of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Any | None = None) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._rules: dict[str, LrRule] = {}
        self._put: list[tuple[dict[str, Any], Lr, Lr]] = []
        self._updates = 0
        self._scheduled: list[Lr] = []
        self._effective: list[Lr] = []
        self._is_disturbed = False
        self._is_entered = False
        """Whether `enter` was called for the step under way."""
        self._was_plain = True
        """Whether no rule changed an LR in the last step."""
        self.first: Lr | None = None
        """LR of the first group, which is the one that trainers log, in the last step; None before it."""
        self._position: int | None = None
        self.seen: SeenCurve | None = None
        """Learns at each update what the schedule has set, for a schedule that cannot be evaluated; else None."""

    def unavailable(self) -> str | None:
        """Why the LR cannot be changed, or None if it can."""
        step = self._optimizer.step
        is_compiled = hasattr(step, "_torchdynamo_orig_callable") or hasattr(step, "get_compiler_config")
        if is_compiled and not all(isinstance(g["lr"], torch.Tensor) for g in self._optimizer.param_groups):
            return "optimizer.step is compiled with a float LR, which makes it a constant; give the LR as a tensor"
        if any("lr" not in group for group in self._optimizer.param_groups):
            return "the optimizer's parameter groups have no lr"
        if any(group["lr"] is None for group in self._optimizer.param_groups):
            return "the optimizer chooses its LR itself (lr=None)"
        return None

    @property
    def updates(self) -> int:
        """Number of optimizer updates since this control was made, replayed ones included."""
        return self._updates

    @property
    def position(self) -> int | None:
        """The scheduler's position (`last_epoch`), or None without one."""
        position = getattr(self._scheduler, "last_epoch", None)
        return position if isinstance(position, int) else None

    @property
    def rules(self) -> dict[str, LrRule]:
        """The rules in force by key, in the order in which they apply."""
        return dict(self._rules)

    def add(self, key: str, rule: LrRule) -> None:
        """Apply a rule from the next update on. Replaces a rule with the same key."""
        self._rules[key] = rule

    def remove(self, key: str) -> LrRule | None:
        """Remove and return a rule."""
        return self._rules.pop(key, None)

    def restore(self, rules: Mapping[str, LrRule]) -> None:
        """Put these rules in force, in their order, and no others."""
        self._rules = dict(rules)

    def group_weights(self) -> list[float]:
        """Each group's base LR divided by the largest: how an LR ceiling is shared among the groups.

        Reads tensors: not for every step."""
        base = [float(group.get("initial_lr", group["lr"])) for group in self._optimizer.param_groups]
        largest = max(base)
        return [value / largest if largest > 0 else 1.0 for value in base]

    def scheduled_lr(self) -> list[float]:
        """The LR that each group holds now. Reads tensors: not for every step."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    # Around optimizer.step

    @property
    def is_at_rest(self) -> bool:
        """Whether `enter` may be left out: no rule applies, and nothing is learnt from the schedule."""
        return self.seen is None and not self._rules and not self._put

    def enter(self) -> None:
        """Put the effective LRs into the parameter groups. A group that no rule changes is not touched."""
        if self._put:
            self.leave()
        position = self._position = None if self._scheduler is None else self.position
        originals: list[Lr] = [group["lr"] for group in self._optimizer.param_groups]
        if self.seen is not None:
            self.seen.note(position, originals)
        self._scheduled = [lr.clone() if isinstance(lr, torch.Tensor) else lr for lr in originals]
        self._is_entered = True
        if not self._rules:
            return
        written: set[int] = set()
        for index, (group, original) in enumerate(zip(self._optimizer.param_groups, originals, strict=True)):
            if id(original) in written:  # one LR tensor given for all groups is the same object in each of them
                continue
            lr = original
            for rule in self._rules.values():
                lr = rule.transform(lr, group=index, update=self._updates, position=position)
            if lr is original:
                continue
            if isinstance(original, torch.Tensor):
                original.copy_(lr)  # type: ignore[arg-type]
                written.add(id(original))
                self._put.append((group, original, self._scheduled[index]))
            elif lr != original:
                group["lr"] = lr
                self._put.append((group, lr, original))

    def leave(self) -> None:
        """Note the LRs that the optimizer used, and restore the user's own LR objects."""
        self._effective = [
            lr.clone() if isinstance(lr := group["lr"], torch.Tensor) else lr for group in self._optimizer.param_groups
        ]
        if not self._is_entered and not self._rules:
            self._scheduled, self._position = self._effective, None if self._scheduler is None else self.position
        self._is_entered = self._is_disturbed = False
        self._updates += 1
        self.first = self._effective[0] if self._effective else None
        self._was_plain = not self._put
        if self._was_plain:
            return
        for group, ours, saved in self._put:
            if group["lr"] is not ours:
                # The optimizer set the LR itself during the step (a learning-rate-free method): leave it alone.
                self._is_disturbed = True
            elif isinstance(ours, torch.Tensor):
                ours.copy_(saved)  # type: ignore[arg-type]
            else:
                group["lr"] = saved
        self._put = []

    # Read-back

    @property
    def is_disturbed(self) -> bool:
        """Whether something else replaced the LR during the last step."""
        return self._is_disturbed

    @property
    def effective(self) -> list[Lr]:
        """LR of each group in the last optimizer step (device tensors are not read); empty before the first."""
        return list(self._effective)

    @property
    def scheduled(self) -> list[Lr]:
        """LR of each group as the scheduler had it in the last optimizer step."""
        return list(self._scheduled)

    @property
    def last_position(self) -> int | None:
        """The scheduler's position in the last optimizer step."""
        return self._position

    def demanded(self) -> list[float]:
        """The LR of each group that the current rules demand for the schedule of the last step. Reads tensors."""
        demanded: list[float] = []
        for index, scheduled in enumerate(self._scheduled):
            lr = scheduled
            for rule in self._rules.values():
                lr = rule.transform(lr, group=index, update=self._updates - 1, position=self._position)
            demanded.append(float(lr))
        return demanded

    def effective_lr(self) -> float | None:
        """The largest effective LR of the last step; None before the first, or if the LR is on a device."""
        return _largest(self._effective)

    def factor(self) -> float | None:
        """Effective over scheduled LR in the last step (largest of each): 1.0 if no rule changed an LR, None if either
        is unknown (an LR on a device)."""
        if self._was_plain:
            return 1.0
        effective, scheduled = _largest(self._effective), _largest(self._scheduled)
        if effective is None or scheduled is None:
            return None if self._rules else 1.0
        return effective / scheduled if scheduled else 1.0


def _largest(values: list[Lr]) -> float | None:
    if not values or any(v is None or (isinstance(v, torch.Tensor) and v.device.type != "cpu") for v in values):
        return None
    return max(float(v) for v in values)
