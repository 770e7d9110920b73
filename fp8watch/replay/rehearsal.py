"""What a policy would have done in a recorded run: the live decision function, given what the detectors saw.

A recording cannot react, so the effect of remedies has to be assumed, and the answer names the assumption: `helped`
(every remedy works at once: the least that the policy would have done) or `nothing` (none works: the most). The truth
lies between. Obstacles (no checkpoint, a spent budget, nobody to approve) are real.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from typing import Any, Literal

from fp8watch.controller.checkpoints import Ledger
from fp8watch.controller.history import History
from fp8watch.detect.base import Sample
from fp8watch.policy import events
from fp8watch.policy.decide import decide
from fp8watch.policy.outcome import PRECISION, overlaps
from fp8watch.policy.schema import Policy
from fp8watch.policy.state import Decision, PolicyState
from fp8watch.policy.unresolved import why_unresolved
from fp8watch.policy.view import Trouble, View
from fp8watch.records import CheckpointRecord
from fp8watch.replay.recording import Facts, Seen

Assume = Literal["helped", "nothing"]
_BUSY = frozenset({"waiting", "sent", "settling", "undoing"})
KEPT_CHECKPOINTS = 512
"""Number of newest checkpoints that a rollback may choose from."""
_KINDS = {"apply": "apply", "propose": "propose", "wait": "wait", "revert": "undo"}


class Rehearsal:
    """Follows one run under one policy.

    `checkpoint_every`: assumed for recordings that do not record checkpoints; 0: no rollback is possible in them.
    """

    def __init__(
        self,
        run: str,
        policy: Policy,
        *,
        facts: Facts | None = None,
        assume: Assume = "helped",
        checkpoint_every: int = 0,
        warmup_steps: int | None = None,
    ) -> None:
        self._run = run
        self._policy = policy
        self._facts = facts or Facts()
        self._assume = assume
        self._checkpoint_every = checkpoint_every
        self._warmup_steps = warmup_steps
        self._state = PolicyState()
        self._history = History()
        self._ledger = Ledger(policy.healthy_steps)
        self._given_up: set[str] = set()
        """Incidents whose remedy is assumed to have helped, until they end in the recording."""
        self._on_its_way: Decision | None = None
        self._seen = self._began = 0
        self._attempt = self._recorded_attempt = 0
        self._tokens: deque[float] = deque(maxlen=256)
        self._saved_at = 0
        self.applied: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        """Kind of line -> count."""
        self.in_force: Counter[str] = Counter()
        """Action -> recorded steps in which it would have been in force."""
        self.steps_replayed = 0
        self.tokens_replayed: float | None = 0.0
        self.halted_step: int | None = None

    def observe(self, seen: Seen) -> list[dict[str, Any]]:
        """Rows to print for what is decided in this step."""
        sample = seen.sample
        self._take_in(sample)
        if self.halted_step is not None:
            return []
        troubles = seen.troubles()
        for record in self._saved(sample):
            self._ledger.add(record)
        if troubles or self._ledger.has_unsettled:
            self._ledger.passed(sample.step, troubles, lambda incident: self._why_unresolved(sample, incident))
        self._given_up &= {item.incident for item in troubles}
        if not troubles and self._is_idle():
            return []
        view = self._view(sample, tuple(item for item in troubles if item.incident not in self._given_up))
        self._arrive(view)
        self._state, decisions = decide(self._policy, self._state, view)
        lines = [line for decision in decisions if (line := self._taken(decision, view, troubles)) is not None]
        for held in self._state.in_force:
            self.in_force[held.action] += 1
        return lines

    def cost(self) -> dict[str, Any]:
        """What the policy would have done and cost so far."""
        return {
            "assumed": f"every remedy {'works at once' if self._assume == 'helped' else 'does nothing'}",
            "checkpoints": self._where_checkpoints_come_from(),
            "applied": dict(sorted(self.applied.items())),
            "actions": sum(self.applied.values()),
            "rollbacks": self.applied["rollback"],
            "steps_replayed": self.steps_replayed,
            "tokens_replayed": self.tokens_replayed,
            "steps_in_force": dict(sorted(self.in_force.items())),
            "proposed": self.answers["propose"],
            "asked": self.answers["wait"],
            "unavailable": self.answers["unavailable"],
            "refused": self.answers["refused"],
            "expired": self.answers["expired"],
            "undone": self.answers["undo"],
            "halted_step": self.halted_step,
        }

    # The run

    def _take_in(self, sample: Sample) -> None:
        self._seen += 1
        if sample.attempt > self._recorded_attempt:
            self._recorded_attempt = sample.attempt
            self._attempt += 1
            self._began = self._seen
            self._history.rewind(sample.step - 1)
            self._state = events.rolled_back(self._state)
        self._history.add(sample)
        if "tokens" in sample.scalars:
            self._tokens.append(sample.scalars["tokens"])

    def _saved(self, sample: Sample) -> list[CheckpointRecord]:
        if self._facts.saved:
            saved, self._facts.saved = self._facts.saved, []
            self._checkpoint_every = 0
            return saved
        every = self._checkpoint_every
        if not every or sample.step // every <= self._saved_at // every:
            return []
        self._saved_at = sample.step
        step = sample.step // every * every
        if len(self._ledger.records()) > 2 * KEPT_CHECKPOINTS:
            self._ledger.keep_newest(KEPT_CHECKPOINTS)
        return [
            CheckpointRecord(
                run=self._run, attempt=self._attempt, checkpoint=f"assumed-{self._attempt}-{step}", step=step,
                path="assumed", label="candidate", has_data_position=True,
            )
        ]  # fmt: skip

    def _why_unresolved(self, sample: Sample, incident: str) -> str | None:
        return why_unresolved(self._policy, self._state, self._view(sample, ()), incident)

    def _where_checkpoints_come_from(self) -> str:
        if self._checkpoint_every:
            return f"assumed every {self._checkpoint_every} steps"
        return "as recorded" if self._ledger.records() else "none"

    def _is_idle(self) -> bool:
        state = self._state
        return (
            self._on_its_way is None
            and not state.in_force
            and not state.leftovers
            and not any(track.phase in _BUSY or track.is_due for track in state.tracks)
        )

    def _view(self, sample: Sample, troubles: tuple[Trouble, ...]) -> View:
        history = self._history
        warmup = self._warmup_steps if self._warmup_steps is not None else self._facts.warmup_steps
        losses = tuple(history.losses)
        if self._assume == "helped" and self._given_up:  # the loss would be as before the onset
            onset = min((t.trouble.onset_step for t in self._state.tracks if t.phase == "settling"), default=0)
            losses = tuple(pair for pair in losses if pair[0] < onset) or losses
        return View(
            run=self._run,
            step=sample.step,
            seen=self._seen,
            attempt=self._attempt,
            troubles=troubles,
            unavailable=self._facts.unavailable,
            checkpoints=self._ledger.records()[-KEPT_CHECKPOINTS:],
            warmup_steps=warmup,
            modules=tuple(dict.fromkeys(column.module for column in sample.tensors)),
            tensors=tuple(column.name for column in sample.tensors),
            losses=losses,
            learning_rates=tuple(history.learning_rates),
            grad_norm_median=history.grad_norm_median(),
            num_skipped=history.num_skipped,
            params_nonfinite=history.params_nonfinite,
            is_nonfinite_now=history.is_nonfinite_now,
            is_busy=self._on_its_way is not None,
            since_start=self._seen - self._began if self._began else None,
            clip_rate=history.clip_rate(),
        )

    # What is done

    def _arrive(self, view: View) -> None:
        """The decision sent in the previous step has been applied and read back."""
        decision, self._on_its_way = self._on_its_way, None
        if decision is None:
            return
        if decision.kind == "revert":
            self._state = events.reverted(self._state, view, decision.action_id, ok=True)
            return
        self._state = events.applied(self._policy, self._state, view, decision.action_id)
        if decision.action == "rollback":
            self._attempt += 1
            self._state = events.rolled_back(self._state)

    def _taken(self, decision: Decision, view: View, troubles: tuple[Trouble, ...]) -> dict[str, Any] | None:
        kind = decision.status if decision.kind == "record" else _KINDS.get(decision.kind)
        if kind is None:  # notes and verdicts: the recording cannot tell how a remedy went
            return None
        self.answers[kind] += 1
        if decision.kind in {"apply", "revert"} and decision.action != "skip_update":
            self._on_its_way = decision
        if decision.kind == "apply":
            self._pay(decision, view)
            if self._assume == "helped":
                self._given_up |= _answered(decision, troubles)
        return {
            "action": decision.action,
            "step": view.step,
            "severity": "proposal",
            "run": self._run,
            "kind": kind,
            "mode": decision.mode,
            "params": dict(decision.params),
            "rule": decision.rule,
            "finding": decision.trouble.finding if decision.trouble else None,
            "reason": decision.reason,
        }

    def _pay(self, decision: Decision, view: View) -> None:
        self.applied[decision.action] += 1
        if decision.action == "halt":
            self.halted_step = view.step
        if decision.action == "rollback":
            steps = view.step - int(decision.params["checkpoint_step"])
            self.steps_replayed += steps
            # Recent tokens per step; without them in the log the sum is unknown.
            if self.tokens_replayed is not None:
                self.tokens_replayed = (
                    self.tokens_replayed + steps * statistics.median(self._tokens) if self._tokens else None
                )


def _answered(decision: Decision, troubles: tuple[Trouble, ...]) -> set[str]:
    """The open incidents that a remedy ends if it works: its own, and others that it affects."""
    own = decision.trouble
    if own is None or decision.action in {"rollback", "halt"}:
        return {item.incident for item in troubles}
    reached = {own.incident}
    if decision.action in {"repair_scale", "raise_margin", "bf16_layers", "bf16_all"}:
        is_whole = decision.action == "bf16_all"
        reached |= {x.incident for x in troubles if x.detector in PRECISION and (is_whole or overlaps(x, own))}
    return reached
