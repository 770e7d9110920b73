"""`rollback`: return the whole process, in place, to a checkpoint from before the onset."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fp8watch.actions import params as read
from fp8watch.actions.base import Action, Applied, ReadBack
from fp8watch.actions.context import ActionContext
from fp8watch.actions.first_update import FirstUpdate
from fp8watch.actions.joint import Answer, Ask
from fp8watch.actions.lr_rules import LrRule
from fp8watch.actions.undo import settled, take_back
from fp8watch.capture.gradients import has_scaler
from fp8watch.checkpoints.manager import CheckpointManager
from fp8watch.checkpoints.restore import Loaded, PartlyRestored, RestoreReport, Unfit
from fp8watch.errors import ActionError, CheckpointError, PartlyChanged
from fp8watch.records import CheckpointRecord
from fp8watch.vocabulary import MAX_SKIP_BATCHES

CHANGES = ("bf16_all", "bf16_layers", "hold_lr", "rewarm", "tighten_clip", "raise_margin")
"""Actions that may be combined with the rollback, so that the replay does not repeat the fault."""
_BF16 = ("bf16_all", "bf16_layers")
_WHEN = ("begin", "_released_at")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """The checked parameters of one rollback."""

    manager: CheckpointManager
    onset_step: int | None
    """First step that the fault affected, if given."""
    skip_batches: int
    allow_without_data: bool
    changes: list[tuple[Action, dict[str, Any]]]
    setting: str
    """Hash of the conditions of the replay: the same batches are replayed at most once under the same setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """The target that all ranks have agreed on."""

    order: _Order
    loaded: Loaded
    refused: dict[str, str]
    ask: Ask

    @property
    def is_alone(self) -> bool:
        """Whether this is the only rank."""
        return self.order.manager.world_size == 1


def _as_changes(value: Any) -> list[dict[str, Any]]:
    """`changes` as a checked list. Raises `ActionError` that names every wrong item and the allowed actions."""
    wanted = f"a list of {{action, params}} is wanted, the action one of {', '.join(CHANGES)}"
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise ActionError(f"changes is {value!r}: {wanted}")
    wrong = [f"[{at}] {reason}" for at, item in enumerate(value) if (reason := _why_no_change(item))]
    if wrong:
        raise ActionError(f"changes: {'; '.join(wrong)}: {wanted}")
    return list(value)


def _why_no_change(item: Any) -> str:
    if not isinstance(item, dict):
        return f"is {item!r}"
    if unknown := [str(key) for key in item if key not in ("action", "params")]:
        return f"has {', '.join(unknown)}"
    if item.get("action") not in CHANGES:
        return f"has the action {item.get('action')!r}"
    given = item.get("params")
    is_mapping = given is None or (isinstance(given, dict) and all(isinstance(key, str) for key in given))
    return "" if is_mapping else f"has the params {given!r}, which is not a mapping from names"


def _unbegun(rule: LrRule) -> str:
    """An LR rule without the updates at which it began and was released."""
    if not dataclasses.is_dataclass(rule):
        return repr(rule)
    held = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule) if field.name not in _WHEN}
    return f"{type(rule).__name__}{held}"


class Rollback:
    """Parameters: `checkpoint` (id) or `onset_step`; `skip_batches`; `allow_without_data`; `changes`.

    What other actions have set (LR factor, clip limit, BF16 modules, margin) stays in force. `changes`, a list of
    `{action, params}`, is applied right after the restore and read back with the rollback. A change that is to be
    reverted later should instead be sent as a separate action at the same boundary.
    """

    name = "rollback"

    def __init__(self, context: ActionContext, actions: Callable[[], dict[str, Action]]) -> None:
        """`actions` returns the table in which `changes` are looked up."""
        self._context = context
        self._actions = actions
        self._chosen: _Chosen | None = None
        self._first_update: FirstUpdate | None = None
        self._changed: list[tuple[Action, Applied]] = []
        self._half_changed: list[str] = []
        """Changes that failed and could not be taken back."""

    def unavailable(self) -> str | None:
        """See `Action`. The data position is checked later, when it is needed: the loop may not have begun yet."""
        return None if self._context.checkpoints is not None else "attach got no checkpoints="

    def choose(self, step: int, params: dict[str, Any], ask: Ask) -> None:
        """See `fp8watch.actions.joint.Choosing`."""
        self._chosen = None
        order, why = None, ""
        try:
            order = self._order(params)
        except Exception as error:  # the other ranks wait for an answer in any case
            why = str(error)
        if order is not None:
            self._finish_saving(order.manager)
        # The ledger is read only after this question: by then the rank that writes it is at this boundary too.
        if ask(Answer.YES if order is not None else Answer.CANNOT, "begin") is not Answer.YES or order is None:
            raise ActionError(why or "another rank cannot roll back")
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
                reasons = "; ".join([*refused.values(), why or "another rank cannot go back to it"])
                raise ActionError(reasons) if target is None and not refused else CheckpointError(reasons)
            refused[target.checkpoint] = why or f"{target.checkpoint}: damaged on another rank"
            target, why = self._next(order, target, refused)

    def _finish_saving(self, manager: CheckpointManager) -> None:
        """Register checkpoints that became durable since the last boundary, so that they can be targets too."""
        try:
            manager.poll()
        except CheckpointError as error:
            self._context.note(str(error))
        except Exception as error:  # an older checkpoint may do, and the other ranks wait for an answer
            self._context.note(f"a checkpoint that was being written could not be registered: {error}")

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
        try:
            if order.manager.was_made_before(target.checkpoint, skip_batches=order.skip_batches, setting=order.setting):
                return None, Answer.CANNOT, f"already rolled back to {target.checkpoint}; nothing would be different"
            loaded = order.manager.load(target.checkpoint, allow_without_data=order.allow_without_data, is_quick=True)
            return loaded, Answer.YES, ""
        except Unfit as error:
            return None, Answer.CANNOT, str(error)
        except CheckpointError as error:
            return None, Answer.DAMAGED, str(error)
        except Exception as error:  # the other ranks wait for an answer in any case
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
        """Hash of the setting of the replay, after `changes`. It is equal for two rollbacks if the second would only
        repeat the first. A change to an absolute value counts as that value, whatever is in force now."""
        context = self._context
        changes = [(change["action"], dict(change.get("params") or {})) for change in params.get("changes") or []]
        names = {name for name, _ in changes}
        held = {module for modules in context.high_precision.values() for module in modules}
        if "bf16_all" in names:
            held = set(context.controls.modules()) if context.controls is not None else set()
        held |= {str(layer) for name, given in changes if name == "bf16_layers" for layer in given.get("layers") or ()}
        limits = [given["max_norm"] for name, given in changes if name == "tighten_clip" and given.get("max_norm")]
        limit = limits[-1] if limits else context.clip.limit
        # Without the updates at which a rule began: these differ each time the same rule is tried.
        rules = {f"{key.partition(':')[0]} {_unbegun(rule)}" for key, rule in context.lr.rules.items()}
        if "rewarm" in names or any(name == "hold_lr" and given.get("to_lr") is not None for name, given in changes):
            rules = {rule for rule in rules if rule.partition(" ")[0] not in names}
        margin = None if context.controls is None else context.controls.margin()
        single = None if context.clip.tensors is None else context.clip.tensors.ratio
        wanted = sorted((name, sorted(given.items())) for name, given in changes if name not in _BF16)
        content = repr((sorted(held), limit, single, margin, sorted(rules), wanted))
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    @staticmethod
    def _first_target(
        manager: CheckpointManager, step: int, params: dict[str, Any]
    ) -> tuple[CheckpointRecord | None, str]:
        """The checkpoint asked for, or why there is none."""
        checkpoint = params.get("checkpoint")
        try:
            if checkpoint is None:
                onset = read.whole(params, "onset_step")
                return manager.newest_usable(before_step=onset), f"no checkpoint from before step {onset}"
            target = manager.target(str(checkpoint))
        except Exception as error:
            return None, str(error)
        if target.step > step:
            return None, f"{checkpoint} is later than step {step}"
        return target, ""

    def apply(self, step: int, params: dict[str, Any]) -> Applied:
        """See `Action`. Raises `CheckpointError` or `ActionError` with nothing changed.

        If the restore fails half-way, raises `PartlyRestored` and halts the run, which must not train from a mixed
        state.
        """
        if self._chosen is None:
            self.choose(step, params, lambda answer, about: answer)
        chosen, self._chosen = self._chosen, None
        assert chosen is not None
        try:
            report = self._restore(chosen, step)
        except Exception:
            if chosen.order.changes:  # the other ranks ask about them
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
            self._continue_from(report, order, step)
        except PartlyRestored as error:
            self._context.halt_reason = f"rollback failed half-way: {error}"
            raise
        return report

    def _continue_from(self, report: RestoreReport, order: _Order, step: int) -> None:
        """Record the rollback, and count on from the restored step. Raises `PartlyRestored`: the state is back, but the
        counters may not be."""
        try:
            if self._first_update is not None:
                self._first_update.remove()
            self._first_update = FirstUpdate(self._context)
            try:
                order.manager.note_rollback(
                    report, from_step=step, skip_batches=order.skip_batches, setting=order.setting
                )  # fmt: skip
            except Exception as error:
                self._context.note(f"rolled back, but the rollback could not be recorded: {error}")
            self._context.rewind(report.step)
            for name, reason in report.refused.items():
                self._context.note(f"checkpoint {name} was refused: {reason}")
        except Exception as error:
            raise PartlyRestored(f"{report.checkpoint} was restored, then: {type(error).__name__}: {error}") from error

    def _change_all(self, chosen: _Chosen, step: int) -> list[dict[str, Any]]:
        """Apply the changes for the replay: on every rank or on none."""
        self._changed, self._half_changed = [], []
        if not chosen.order.changes:
            return []
        found = [self._change(action, step, given) for action, given in chosen.order.changes]
        is_done = all("error" not in change for change in found)
        if chosen.ask(Answer.YES if is_done else Answer.DAMAGED, "changes") is Answer.YES or chosen.is_alone:
            self._changed = [(action, settled(applied)) for action, applied in self._changed]
            return found
        kept = [action.name for action, applied in reversed(self._changed) if not self._take_back(action, applied)]
        kept, self._changed = self._half_changed + kept, []
        if kept:
            raise PartlyRestored(f"{', '.join(kept)}: not done on all ranks, and cannot be undone here")
        return [{"error": "failed on another rank", **change} for change in found]

    def _take_back(self, action: Action, applied: Applied) -> bool:
        try:
            take_back(action, applied)
        except Exception as error:
            self._context.note(f"{action.name}, applied with the rollback, cannot be undone: {error}")
            return False
        return True

    def _changes(self, params: dict[str, Any]) -> list[tuple[Action, dict[str, Any]]]:
        """All changes with their actions. Raises `ActionError` for one that is unavailable, with nothing changed."""
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
        except Exception as error:  # the other ranks wait for the outcome in any case
            is_foreseen = isinstance(error, ActionError | PartlyChanged)
            text = str(error) if is_foreseen else f"{type(error).__name__}: {error}"
            if not isinstance(error, ActionError | CheckpointError):
                self._half_changed.append(action.name)
            self._context.note(f"{action.name}, to be applied with the rollback, failed: {text}")
            return {"action": action.name, "error": text}

    def read_back(self, applied: Applied) -> ReadBack:
        """Whether the first update since started from the restored parameters, the counters continue from there, and
        the changes are in force."""
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
        # A GradScaler skips updates itself; then `optimizer.step` is not called.
        most = math.inf if has_scaler(self._context.scaler) else updates + skipped
        if not 1 <= steps_since <= most:
            problems.append(f"the step counter is {self._context.step()}, it should continue from {expected['step']}")
        if expected["data_restored"] and (samples is None or samples <= expected["samples"]):
            problems.append(f"samples are {samples}, they should continue from {expected['samples']}")
        found = [(action, action.read_back(change)) for action, change in self._changed]
        if any(result.ok is None for _, result in found) and not problems:
            return ReadBack(ok=None, observed=observed, detail="a change is not visible yet")
        problems += [f"{action.name}: {result.detail}" for action, result in found if result.ok is False]
        failed = [change for change in expected["changes"] if "error" in change]
        problems += [f"{change['action']} was not applied: {change['error']}" for change in failed]
        return ReadBack(ok=not problems, observed=observed, detail="; ".join(problems))

    def revert(self, applied: Applied) -> None:
        """Always raises: the abandoned timeline is gone."""
        raise ActionError("a rollback cannot be undone")

    def read_back_revert(self, applied: Applied) -> ReadBack:
        """Never called: `revert` always raises."""
        return ReadBack(ok=False, detail="a rollback cannot be undone")
