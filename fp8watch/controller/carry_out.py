"""The action log of a run: every decision becomes an `ActionRecord`, and every answer changes it.

An action counts as done only once it was read back, and as helpful only once its signal recovered. A skipped update is
the ranks' own standing rule, and is read back from the numbers of the next step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import msgspec

from fp8watch.controller.commands import Conclusion
from fp8watch.detect.base import Sample
from fp8watch.policy.budgets import Spent
from fp8watch.policy.events import taken_over
from fp8watch.policy.schema import Policy
from fp8watch.policy.state import Decision, PolicyState
from fp8watch.policy.turn import join
from fp8watch.policy.view import View
from fp8watch.records import ActionRecord, Command, CommandResult, RunRecord, Stored

_STATUS = {"apply": "sent", "propose": "proposed", "wait": "waiting"}
_REVERTIBLE = frozenset({"hold_lr", "tighten_clip", "raise_margin", "bf16_layers", "bf16_all", "checkpoint_cadence"})


class ActionLog:
    """The actions of one run by id; `changed` returns what is new since the last call."""

    def __init__(self, run: str, clock: Callable[[], float]) -> None:
        self._run = run
        self._clock = clock
        self._actions: dict[str, ActionRecord] = {}
        self._changed: dict[str, None] = {}
        self._standing: str | None = None
        """Id of a skipped update whose next step has not been seen yet."""

    def records(self) -> list[ActionRecord]:
        """All records, as they are now."""
        return [*self._actions.values()]

    def records_of(self, action_ids: Iterable[str]) -> dict[str, ActionRecord]:
        """Those of these ids that are known, as they are now."""
        return {action_id: self._actions[action_id] for action_id in action_ids if action_id in self._actions}

    def changed(self) -> list[ActionRecord]:
        """Records that are new or have changed, each once."""
        records = [self._actions[action_id] for action_id in self._changed]
        self._changed.clear()
        return records

    def take(self, decision: Decision, view: View, start: str = "") -> None:
        """Record a decision. `start`: the training processes that it is for (`Hello.start`)."""
        known = self._actions.get(decision.action_id)
        if decision.kind == "join":
            if known is not None:
                self._joined(known, decision)
            return
        if decision.kind == "verdict":
            # An action undone for lack of effect stays "no_effect"; this reason is appended to that of the decision.
            if known is not None:
                self._judged(known, decision)
            return
        if decision.kind == "revert":
            if known is not None:
                self._put(known, reason=join(known.reason, f"undone: {decision.reason}"))
            return
        status: Any = decision.status or _STATUS[decision.kind]
        if known is not None:
            self._put(
                known, status=status, reason=join(known.reason, decision.reason),
                answered_by=decision.by or known.answered_by,
            )  # fmt: skip
            return
        is_standing = decision.kind == "apply" and decision.action == "skip_update"
        trouble = decision.trouble
        self._actions[decision.action_id] = ActionRecord(
            id=decision.action_id,
            run=self._run,
            attempt=view.attempt,
            action=decision.action,
            params=dict(decision.params),
            rule=decision.rule,
            finding=trouble.finding if trouble is not None else "",
            incident=trouble.incident if trouble is not None else "",
            mode=decision.mode,
            status="applied" if is_standing else status,
            decided_step=view.step,
            applied_step=view.step if is_standing else None,
            reason=decision.reason,
            time_unix=self._clock(),
            expires_step=decision.expires_step,
            start=start,
        )
        self._changed[decision.action_id] = None
        if is_standing:
            self._standing = decision.action_id

    def _joined(self, known: ActionRecord, decision: Decision) -> None:
        """Another incident shares its question. The answer is in the record already when it is shared."""
        trouble = decision.trouble
        if trouble is not None and trouble.incident not in known.incidents:
            more = f"also for {trouble.incident} ({trouble.detector} since step {trouble.onset_step})"
            self._put(known, also=[*known.also, trouble.incident], reason=join(known.reason, more))

    def _judged(self, known: ActionRecord, decision: Decision) -> None:
        """Asked about for several incidents, it has helped if it has helped one, and is kept for that."""
        reason, outcome = decision.reason, decision.outcome
        if known.also and decision.trouble is not None:
            reason = f"{decision.trouble.incident}: {reason}"
            outcome = "helped" if known.outcome == "helped" else outcome
        self._put(known, outcome=outcome, reason=join(known.reason, reason))

    def step_passed(self, sample: Sample) -> ActionRecord | None:
        """Read back a skipped update: the next step starts from parameters that are still sound. Returns the record, if
        one was read back."""
        known = self._actions.get(self._standing or "")
        if known is None or sample.step <= (known.applied_step or 0):
            return None
        self._standing = None
        values = {name: sample.scalars[name] for name in ("loss", "param_nonfinite") if name in sample.scalars}
        is_skipped_again = sample.scalars.get("update_skipped", 0.0) > 0
        is_sound = values.get("param_nonfinite", 0.0) == 0.0 and (
            is_skipped_again or math.isfinite(values.get("loss", math.nan))
        )
        self._put(
            known,
            readback="ok" if is_sound else "failed",
            outcome="helped" if is_sound else "no_effect",
            observed={name: value if math.isfinite(value) else str(value) for name, value in values.items()},
        )
        return self._actions[known.id]

    def applied(self, command: Command, result: CommandResult) -> None:
        """A rank applied it; whether it is in force remains to be read back."""
        known = self._actions.get(command.id)
        if known is not None:
            self._put(known, status="applied", applied_step=result.step, steps_replayed=result.steps_replayed)

    def concluded(self, action_id: str, conclusion: Conclusion) -> None:
        """All ranks have answered, or the time for that is over."""
        known = self._actions.get(action_id)
        if known is None:
            return
        failed = conclusion.result != "applied"
        self._put(
            known,
            status=conclusion.result,
            readback=conclusion.readback,
            applied_step=conclusion.step if not failed else known.applied_step,
            observed=conclusion.observed,
            steps_replayed=conclusion.steps_replayed,
            outcome="no_effect" if failed and conclusion.readback == "failed" else known.outcome,
            reason=join(known.reason, conclusion.detail if failed else ""),
        )

    def settling(self, action_id: str, state: PolicyState) -> None:
        """Record until when its settling window lasts."""
        known = self._actions.get(action_id)
        track = next((item for item in state.tracks if item.action_id == action_id), None)
        if known is not None and track is not None and known.applied_step is not None:
            self._put(known, settle_until=known.applied_step + track.judge_at - track.applied_seen)

    def reverted(self, action_id: str, conclusion: Conclusion, *, is_whole: bool) -> None:
        """An undoing is complete."""
        known = self._actions.get(action_id)
        if known is None:
            return
        if conclusion.result != "applied":
            self._put(known, reason=join(known.reason, f"undoing failed: {conclusion.detail or conclusion.result}"))
        elif is_whole:
            outcome = known.outcome if known.outcome == "no_effect" else "reverted"
            self._put(known, status="reverted", outcome=outcome)
        else:
            layers = list(conclusion.command.params.get("layers", ()))
            why = join(known.reason, f"{', '.join(layers)} returned to FP8")
            self._put(known, returned=[*known.returned, *layers], reason=why)

    def expire(self, action_ids: Iterable[str], reason: str) -> None:
        """Close actions that still wait for a person."""
        for action_id in action_ids:
            known = self._actions.get(action_id)
            if known is not None and known.status == "waiting":
                self._put(known, status="expired", reason=join(known.reason, reason))

    def rollback_under_way(self, attempt: int) -> ActionRecord | None:
        """The newest rollback of this attempt that is sent or just applied; not one that a restart cut short."""
        for record in reversed(self._actions.values()):
            is_rollback = record.action == "rollback" and record.attempt == attempt
            if is_rollback and record.status in {"sent", "applied"} and record.outcome == "pending":
                return record
        return None

    def restore(
        self, state: PolicyState, restored: Iterable[Stored], *,
        policy: Policy, is_same_process: bool, reached: int, seen: int,
    ) -> PolicyState:  # fmt: skip
        """Take over what was done in this run before: ids, budgets, and what is in force.

        The last only within the same training process: nothing is in force in one that was restarted. `reached`: the
        last step known of, which is number `seen` of those observed.
        """
        spent, number = Spent(), 1
        in_force = []
        restored = tuple(restored)
        reached = max([reached, *(record.last_step for record in restored if isinstance(record, RunRecord))])
        for record in restored:
            if not isinstance(record, ActionRecord):
                continue
            self._actions[record.id] = record
            number = max(number, _number(record.id) + 1)
            if record.status in {"sent", "waiting"}:
                self._put(record, status="expired", reason=join(record.reason, "the controller was restarted"))
            if record.status not in {"applied", "reverted"}:
                continue
            checkpoint = record.params.get("checkpoint")
            # The place of earlier actions among the observed steps is the distance that the run has covered since.
            then = seen - max(0, reached - (record.applied_step or record.decided_step))
            spent = spent.after(record.action, seen=then, time_unix=record.time_unix, checkpoint=checkpoint)
            is_in_force = record.action in _REVERTIBLE and record.status == "applied" and record.readback == "ok"
            if is_in_force and is_same_process:
                in_force.append(
                    taken_over(
                        policy, action_id=record.id, action=record.action, rule=record.rule, params=record.params,
                        returned=record.returned, had_no_effect=record.outcome == "no_effect",
                        applied_seen=then, seen=seen,
                    )
                )  # fmt: skip
        return replace(state, spent=spent, next_number=number, in_force=tuple(in_force))

    def _put(self, known: ActionRecord, **changes: Any) -> None:
        self._actions[known.id] = msgspec.structs.replace(known, **changes)
        self._changed[known.id] = None


def _number(action_id: str) -> int:
    tail = action_id.rpartition(".")[2]
    return int(tail) if tail.isdigit() else 0
