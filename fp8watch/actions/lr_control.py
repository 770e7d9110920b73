"""The LR factor: put into the parameter groups around `optimizer.step`, the same objects put back afterwards.

Between steps the groups hold what the user's scheduler put there, so checkpoints and schedulers never see the
factor. The core calls `enter` right before the real `optimizer.step` and `leave` in a `finally`.
"""

from __future__ import annotations

from typing import Any

import torch

from fp8watch.actions.lr_rules import Lr, LrRule
from fp8watch.actions.lr_seen import SeenCurve


class LrControl:
    """Standing LR rules of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Any | None = None) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._rules: dict[str, LrRule] = {}
        self._put: list[tuple[dict[str, Any], Lr, Lr]] = []
        self._updates = 0
        self._scheduled: list[Lr] = []
        self._effective: list[Lr] = []
        self._is_disturbed = False
        self._position: int | None = None
        self.seen: SeenCurve | None = None
        """Told at each update what the schedule has set, where that has to be learnt."""

    def unavailable(self) -> str | None:
        """Why the LR cannot be changed; None: it can."""
        step = self._optimizer.step
        is_compiled = hasattr(step, "_torchdynamo_orig_callable") or hasattr(step, "get_compiler_config")
        if is_compiled and not all(isinstance(g["lr"], torch.Tensor) for g in self._optimizer.param_groups):
            return "optimizer.step is compiled with a float LR, which is a constant there; give the LR as a tensor"
        if any("lr" not in group for group in self._optimizer.param_groups):
            return "the optimizer's parameter groups have no lr"
        return None

    @property
    def updates(self) -> int:
        """Optimizer updates made under this control, replayed ones included."""
        return self._updates

    @property
    def position(self) -> int | None:
        """The scheduler's position (`last_epoch`), None where there is none."""
        position = getattr(self._scheduler, "last_epoch", None)
        return position if isinstance(position, int) else None

    @property
    def rules(self) -> dict[str, LrRule]:
        """The standing rules by key, in the order in which they apply."""
        return dict(self._rules)

    def add(self, key: str, rule: LrRule) -> None:
        """Let a rule stand from the next update on; the same key replaces."""
        self._rules[key] = rule

    def remove(self, key: str) -> LrRule | None:
        """End a rule; what it was."""
        return self._rules.pop(key, None)

    def group_weights(self) -> list[float]:
        """Each group's base LR over the largest: how an LR level is shared out. Reads tensors: not for each step."""
        base = [float(group.get("initial_lr", group["lr"])) for group in self._optimizer.param_groups]
        largest = max(base)
        return [value / largest if largest > 0 else 1.0 for value in base]

    def scheduled_lr(self) -> list[float]:
        """What the groups hold now, by group. Reads tensors: not for each step."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    # Around optimizer.step

    def enter(self) -> None:
        """Put the effective LRs into the parameter groups. Touches nothing where no rule changes anything."""
        if self._put:
            self.leave()
        self._scheduled = []
        position = self._position = self.position
        if self.seen is not None:
            self.seen.note(position, [group["lr"] for group in self._optimizer.param_groups])
        for index, group in enumerate(self._optimizer.param_groups):
            original: Lr = group["lr"]
            lr = original
            for rule in self._rules.values():
                lr = rule.transform(lr, group=index, update=self._updates, position=position)
            saved: Lr = original.clone() if isinstance(original, torch.Tensor) else original
            self._scheduled.append(saved)
            if lr is original:
                continue
            if isinstance(original, torch.Tensor):
                original.copy_(lr)  # type: ignore[arg-type]
                self._put.append((group, original, saved))
            elif lr != original:
                group["lr"] = lr
                self._put.append((group, lr, original))

    def leave(self) -> None:
        """Note what the optimizer had in its hands, and put the user's own LR objects back."""
        self._effective = [
            lr.clone() if isinstance(lr := group["lr"], torch.Tensor) else lr for group in self._optimizer.param_groups
        ]
        self._is_disturbed = False
        for group, ours, saved in self._put:
            if group["lr"] is not ours:
                # The optimizer set its own LR during the step (a learning-rate-free method): that is its state.
                self._is_disturbed = True
            elif isinstance(ours, torch.Tensor):
                ours.copy_(saved)  # type: ignore[arg-type]
            else:
                group["lr"] = saved
        self._put = []
        self._updates += 1

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
        """What the rules that stand now ask for at the last step's schedule, by group. Reads tensors."""
        demanded: list[float] = []
        for index, scheduled in enumerate(self._scheduled):
            lr = scheduled
            for rule in self._rules.values():
                lr = rule.transform(lr, group=index, update=self._updates - 1, position=self._position)
            demanded.append(float(lr))
        return demanded

    def effective_lr(self) -> float | None:
        """The largest effective LR of the last step; None before it, or when it lies on a device."""
        return _largest(self._effective)

    def factor(self) -> float | None:
        """What the last step's LR was multiplied with (largest group): 1.0 when untouched; None as above."""
        effective, scheduled = _largest(self._effective), _largest(self._scheduled)
        if effective is None or scheduled is None:
            return None if self._rules else 1.0
        return effective / scheduled if scheduled else 1.0


def _largest(values: list[Lr]) -> float | None:
    if not values or any(isinstance(v, torch.Tensor) and v.device.type != "cpu" for v in values):
        return None
    return max(float(v) for v in values)
