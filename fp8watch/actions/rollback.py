"""`rollback`: the whole process back to a checkpoint from before the onset, in place."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fp8watch.actions import params as read
from fp8watch.actions.base import Action, Applied, ReadBack
from fp8watch.actions.context import ActionContext
from fp8watch.actions.first_update import FirstUpdate
from fp8watch.actions.joint import Answer, Ask
from fp8watch.checkpoints.manager import CheckpointManager
from fp8watch.checkpoints.restore import Loaded, PartlyRestored, RestoreReport, Unfit
from fp8watch.errors import ActionError, CheckpointError
from fp8watch.records import CheckpointRecord
from fp8watch.vocabulary import MAX_SKIP_BATCHES

CHANGES = ("bf16_all", "bf16_layers", "hold_lr", "rewarm", "tighten_clip", "raise_margin")
"""What may be changed before the replay, so that it does not repeat what went wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """The parameters, checked."""

    manager: CheckpointManager
    onset_step: int | None
    """First step that the fault touched, where it was told."""
    skip_batches: int
    allow_without_data: bool
    changes: list[tuple[Action, dict[str, Any]]]
    setting: str
    """What the replay runs under: at most one is made of the same batches under the same setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    order: _Order
    loaded: Loaded
    refused: dict[str, str]
    ask: Ask

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank."""
        return self.order.manager.world_size == 1


def _as_changes(value: Any) -> list[dict[str, Any]]:
    """What `changes` should be. Raises `ActionError` with all that is not, and what may be changed."""
    wanted = f"a list of {{action, params}} is wanted, the action one of {', '.join(CHANGES)}"
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise ActionError(f"changes is {value!r}: {wanted}")
    wrong = [f"[{at}] {reason}" for at, item in enumerate(value) if (reason := _no_change(item))]
    if wrong:
        raise ActionError(f"changes: {'; '.join(wrong)}: {wanted}")
    return list(value)


def _no_change(item: Any) -> str:
    if not isinstance(item, dict):
        return f"is {item!r}"
    if unknown := [str(key) for key in item if key not in ("action", "params")]:
        return f"has {', '.join(unknown)}"
    if item.get("action") not in CHANGES:
        return f"has the action {item.get('action')!r}"
    given = item.get("params")
    is_mapping = given is None or (isinstance(given, dict) and all(isinstance(key, str) for key in given))
    return "" if is_mapping else f"has the params {given!r}, no mapping from names"


class Rollback:
    """Parameters: `checkpoint` (id) or `onset_step`; `skip_batches`; `allow_without_data`; `changes`.

    What other actions have in force (LR factor, clip limit, BF16 modules, margin) stays in force. `changes`, a
    list of `{action, params}`, is applied right after the restore and read back with the rollback; what shall be
    reverted later is better sent as an action of its own at the same boundary.
    """

    name = "rollback"

    def __init__(self, context: ActionContext, actions: Callable[[], dict[str, Action]]) -> None:
        """`actions` gives the table that `changes` are looked up in."""
        self._context = context
        self._actions = actions
        self._chosen: _Chosen | None = None
        self._first_update: FirstUpdate | None = None
        self._changed: list[tuple[Action, Applied]] = []

    def unavailable(self) -> str | None:
        """See `Action`. The data position is asked for when it is needed: the loop may not have begun."""
        return None if self._context.checkpoints is not None else "attach got no checkpoints="

    def choose(self, step: int, params: dict[str, Any], ask: Ask) -> None:
        """See `fp8watch.actions.joint.Choosing`."""
        self._chosen = None
        order, why = None, ""
        try:
            order = self._order(params)
        except Exception as error:  # whatever it is, the other ranks wait for an answer
            why = str(error)
        if order is not None:
            self._finish_saving(order.manager)
        # The ledger is read after this: from then on the rank that writes it stands at this boundary too.
        if ask(Answer.YES if order is not None else Answer.CANNOT, "begin") is not Answer.YES or order is None:
            raise ActionError(why or "another rank cannot")
        refused: dict[str, str] = {}
        target, why = self._first_target(order.manager, step, params)
        while True:
            loaded, answer = None, Answer.CANNOT
            if target is not None:
                loaded, answer, why = self._try(order, target)
            joint = ask(answer, target.checkpoint if target is not None else "none")
            if joint is Answer.YES and loaded is not None:
                self._chosen = _Chosen(order=order, loaded=loaded, refused=refused, ask=ask)
                return
            if joint is Answer.CANNOT or target is None:
                said = "; ".join([*refused.values(), why or "another rank cannot go back to it"])
                raise ActionError(said) if target is None and not refused else CheckpointError(said)
            refused[target.checkpoint] = why or f"{target.checkpoint}: damaged where another rank reads it"
            target, why = self._next(order, target, refused)

    def drop_choice(self) -> None:
        """See `fp8watch.actions.joint.Choosing`."""
        self._chosen = None

    def _finish_saving(self, manager: CheckpointManager) -> None:
        """What has become durable since the last boundary is a target too, else it would depend on the disk's haste
        whether there is one."""
        try:
            manager.poll()
        except CheckpointError as error:
            self._context.note(str(error))

    @staticmethod
    def _next(order: _Order, target: CheckpointRecord, refused: dict[str, str]) -> tuple[CheckpointRecord | None, str]:
        try:
            order.manager.refuse(target.checkpoint, refused[target.checkpoint])
            found = order.manager.next_best(target, refused, onset_step=order.onset_step)
            return found, "no other one from before the onset is intact"
        except Exception as error:
            return None, str(error)

    @staticmethod
    def _try(order: _Order, target: CheckpointRecord) -> tuple[Loaded | None, Answer, str]:
        if order.manager.was_made_before(target.checkpoint, skip_batches=order.skip_batches, setting=order.setting):
            return None, Answer.CANNOT, f"gone back to {target.checkpoint} before, and nothing would be different"
        try:
            loaded = order.manager.load(target.checkpoint, allow_without_data=order.allow_without_data, is_quick=True)
            return loaded, Answer.YES, ""
        except Unfit as error:
            return None, Answer.CANNOT, str(error)
        except CheckpointError as error:
            return None, Answer.DAMAGED, str(error)
        except Exception as error:  # whatever it is, the other ranks wait for an answer
            return None, Answer.CANNOT, f"{type(error).__name__}: {error}"

    def _order(self, params: dict[str, Any]) -> _Order:
        manager = self._context.checkpoints
        if manager is None:
            raise ActionError("attach got no checkpoints=")
        onset = None
        if params.get("checkpoint") is None or params.get("onset_step") is not None:
            onset = read.whole(params, "onset_step")
        without_data = read.flag(params, "allow_without_data") or params.get("if_data_position_missing") == "accept"
        return _Order(
            manager=manager, onset_step=onset,
            skip_batches=read.whole(params, "skip_batches", 0, at_most=MAX_SKIP_BATCHES),
            allow_without_data=without_data, changes=self._changes(params), setting=self._setting(params),
        )  # fmt: skip

    def _setting(self, params: dict[str, Any]) -> str:
        context = self._context
        held = sorted({module for modules in context.high_precision.values() for module in modules})
        changes = [
            (change["action"], sorted((change.get("params") or {}).items())) for change in params.get("changes") or []
        ]
        margin = None if context.controls is None else context.controls.margin()
        single = None if context.clip.tensors is None else context.clip.tensors.ratio
        rules = sorted(f"{key.partition(':')[0]} {rule}" for key, rule in context.lr.rules.items())
        content = repr((held, context.clip.limit, single, margin, rules, changes))
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    @staticmethod
    def _first_target(
        manager: CheckpointManager, step: int, params: dict[str, Any]
    ) -> tuple[CheckpointRecord | None, str]:
        """The one that was asked for, or why there is none."""
        checkpoint = params.get("checkpoint")
        try:
            if checkpoint is None:
                onset = read.whole(params, "onset_step")
                return manager.newest_usable(before_step=onset), f"no checkpoint from before step {onset}"
            target = manager.target(str(checkpoint))
        except Exception as error:
            return None, str(error)
        if target.step > step:
            return None, f"{checkpoint} lies ahead of step {step}"
        return target, ""

    def apply(self, step: int, params: dict[str, Any]) -> Applied:
        """See `Action`. Raises `CheckpointError` or `ActionError` with nothing changed.

        If restoring fails half-way the run is halted: mixed state must not be trained on.
        """
        if self._chosen is None:
            self.choose(step, params, lambda answer, about: answer)
        chosen, self._chosen = self._chosen, None
        assert chosen is not None
        try:
            report = self._restore(chosen, step)
        except Exception:
            if chosen.order.changes:  # the others will ask about these
                chosen.ask(Answer.CANNOT, "changes")
            raise
        applied_changes = self._change_all(chosen, report.step)
        return Applied(
            step=step,
            params=params,
            before={"step": step},
            expected={
                "checkpoint": report.checkpoint,
                "step": report.step,
                "samples": report.samples,
                "data_restored": report.data_restored,
                "parameter_checksum": report.parameter_checksum,
                "refused": report.refused,
                "changes": applied_changes,
                "after_update": self._context.lr.updates,
                "after_skipped": int(self._context.skip.total),
            },
            steps_replayed=step - report.step,
        )

    def _restore(self, chosen: _Chosen, step: int) -> RestoreReport:
        order = chosen.order
        try:
            report = order.manager.put_back(chosen.loaded, skip_batches=order.skip_batches, refused=chosen.refused)
        except PartlyRestored as error:
            self._context.halt_reason = f"rollback failed half-way: {error}"
            raise
        if self._first_update is not None:
            self._first_update.remove()
        self._first_update = FirstUpdate(self._context)
        try:
            order.manager.note_rollback(
                report, from_step=step, skip_batches=order.skip_batches, setting=order.setting
            )  # fmt: skip
        except CheckpointError as error:
            self._context.note(f"rolled back, but not written down: {error}")
        self._context.rewind(report.step)
        for name, reason in report.refused.items():
            self._context.note(f"checkpoint {name} was refused: {reason}")
        return report

    def _change_all(self, chosen: _Chosen, step: int) -> list[dict[str, Any]]:
        """What is to be different in the replay: on every rank, or on none."""
        self._changed = []
        if not chosen.order.changes:
            return []
        found = [self._change(action, step, given) for action, given in chosen.order.changes]
        is_done = all("error" not in change for change in found)
        if chosen.ask(Answer.YES if is_done else Answer.DAMAGED, "changes") is Answer.YES or chosen.is_alone:
            return found
        for action, applied in self._changed:
            action.revert(applied)
        self._changed = []
        return [{"error": "another rank could not", **change} for change in found]

    def _changes(self, params: dict[str, Any]) -> list[tuple[Action, dict[str, Any]]]:
        """All changes, looked up before anything is touched."""
        table = self._actions()
        found: list[tuple[Action, dict[str, Any]]] = []
        for change in _as_changes(params.get("changes")):
            name, given = change["action"], dict(change.get("params") or {})
            if reason := table[name].unavailable() if name in table else "not in this version":
                raise ActionError(f"changes: {name}: {reason}")
            found.append((table[name], given))
        return found

    def _change(self, action: Action, step: int, params: dict[str, Any]) -> dict[str, Any]:
        try:
            applied = action.apply(step, params)
            self._changed.append((action, applied))
            return {"action": action.name, "params": applied.params}
        except ActionError as error:
            self._context.note(f"{action.name} was to change with the rollback and did not: {error}")
            return {"action": action.name, "error": str(error)}

    def read_back(self, applied: Applied) -> ReadBack:
        """Done only when the first new update began from the restored parameters and counters go on from there."""
        expected = applied.expected
        seen = self._first_update
        if seen is None or self._context.lr.updates <= expected["after_update"]:
            return ReadBack(ok=None, detail="no optimizer step has been made since")
        if seen.checksum is None:
            return ReadBack(ok=None, detail="the first optimizer step was not seen")
        samples = self._context.data.samples if self._context.data is not None else None
        observed: dict[str, Any] = {
            "checkpoint": expected["checkpoint"],
            "step": self._context.step(),
            "samples": samples,
            "learning_rate": self._context.lr.effective_lr(),
        }
        problems = []
        if seen.checksum != expected["parameter_checksum"]:
            problems.append("the first update did not begin from the restored parameters")
        steps_since = self._context.step() - expected["step"]
        updates = self._context.lr.updates - expected["after_update"]
        skipped = int(self._context.skip.total) - expected["after_skipped"]
        if not 1 <= steps_since <= updates + skipped:
            problems.append(f"the step counter is {self._context.step()}, it was to go on from {expected['step']}")
        if expected["data_restored"] and (samples is None or samples <= expected["samples"]):
            problems.append(f"samples are {samples}, they were to go on from {expected['samples']}")
        found = [(action, action.read_back(change)) for action, change in self._changed]
        if any(result.ok is None for _, result in found) and not problems:
            return ReadBack(ok=None, observed=observed, detail="a change is not visible yet")
        problems += [f"{action.name}: {result.detail}" for action, result in found if result.ok is False]
        failed = [change for change in expected["changes"] if "error" in change]
        problems += [f"{change['action']} was not changed: {change['error']}" for change in failed]
        return ReadBack(ok=not problems, observed=observed, detail="; ".join(problems))

    def revert(self, applied: Applied) -> None:
        """The timeline that was left is gone."""
        raise ActionError("a rollback cannot be undone")
