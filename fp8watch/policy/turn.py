"""One call of `decide`: the state as it changes, the decisions so far, and how each is recorded."""

from __future__ import annotations

from dataclasses import replace

from fp8watch.policy.budgets import refusal
from fp8watch.policy.match import passed_over
from fp8watch.policy.rungs import Rung
from fp8watch.policy.schema import Policy, Rule
from fp8watch.policy.state import Decision, InForce, PolicyState, Track
from fp8watch.policy.view import Trouble, View


class Turn:
    """Base of the decision in `fp8watch.policy.decide`: sends, reverts, and records with the reason."""

    def __init__(self, policy: Policy, state: PolicyState, view: View) -> None:
        self.policy = policy
        self.state = state
        self.view = view
        self.decisions: list[Decision] = []
        self.is_busy = view.is_busy

    # What is done

    def _send(self, track: Track, rule: Rule, rung: Rung, params: dict[str, object], why: str, by: str = "") -> None:
        action_id = track.action_id if track.phase == "waiting" else self._new_id()
        self.decisions.append(
            Decision(
                kind="apply", action_id=action_id, action=rung.action, params=params, rule=rule.name,
                trouble=track.trouble, mode=self.policy.rung_mode(rule, rung), reason=why, rung=rung, by=by,
                considered=self._considered(rule.name, track.trouble),
            )
        )  # fmt: skip
        self.is_busy = True
        self.state = self.state.with_track(
            replace(
                track, phase="sent", is_due=False, action_id=action_id, action=rung.action, params=params, asked_for=""
            )
        )

    def _revert(self, held: InForce, layers: tuple[str, ...], why: str, *, is_trial: bool = False) -> None:
        params: dict[str, object] = {"layers": list(layers)} if held.action == "bf16_layers" else {}
        if held.action == "bf16_layers" and len(layers) < len(held.layers):
            # Only some of the layers: the command has an id of its own and names the action that it partly undoes.
            params["of"] = held.action_id
        self.decisions.append(
            Decision(
                kind="revert", action_id=held.action_id, action=held.action, params=params, rule=held.rule, reason=why
            )
        )
        self.is_busy = True
        self.state = self.state.with_held(replace(held, is_undoing=True, is_trial=is_trial, undoing_layers=layers))

    # What is written down

    def _note(self, trouble: Trouble, rule: str, why: str) -> None:
        """Record why nothing is done: once for each reason, not in every step."""
        if self.state.notes.get(trouble.incident) == why:
            return
        open_ones = {item.incident for item in self.view.troubles}
        notes = {name: text for name, text in self.state.notes.items() if name in open_ones}
        self.state = replace(self.state, notes=notes | {trouble.incident: why})
        self.decisions.append(Decision(kind="note", action_id="", action="", rule=rule, trouble=trouble, reason=why))

    def _rule(self, track: Track) -> Rule | None:
        return self.policy.rule_named(track.rule)

    def _rung(self, track: Track) -> Rung | None:
        return self.policy.rung_at(track.rule, track.rung)

    def _refusal(self, rung: Rung) -> str | None:
        return refusal(
            self.policy.budgets, self.state.spent, rung.action, seen=self.view.seen, time_unix=self.view.time_unix
        )

    def _new_id(self) -> str:
        number = self.state.next_number
        self.state = replace(self.state, next_number=number + 1)
        return f"{self.view.run}-{self.view.term}.{number:04d}"

    def _announce(self, kind: str, track: Track, rung: Rung, why: str, mode: str) -> str:
        action_id = self._new_id()
        rule = self._rule(track)
        expires = None
        if kind == "wait" and rule is not None:
            expires = self.view.step + self.policy.approval_of(rule).timeout_steps
        self.decisions.append(
            Decision(
                kind=kind, action_id=action_id, action=rung.action, params=track.params, rule=track.rule,  # type: ignore[arg-type]
                trouble=track.trouble, mode=mode, reason=why, rung=rung, expires_step=expires,  # type: ignore[arg-type]
                considered=self._considered(track.rule, track.trouble),
            )
        )  # fmt: skip
        return action_id

    def _join(self, track: Track, asked: Track) -> Track:
        """The track of an incident that another one's question covers."""
        why = f"covered by a question that waits, asked for {asked.trouble.incident} ({asked.trouble.detector})"
        track = replace(
            track, phase="waiting", action_id=asked.action_id, action=asked.action, params=asked.params,
            asked_for=asked.trouble.incident,
        )  # fmt: skip
        self._share(track, why)
        return track

    def _share(self, track: Track, why: str, by: str = "", status: str | None = None) -> None:
        """Record that an incident shares another one's question, or the answer to it."""
        rule, rung = self._rule(track), self._rung(track)
        mode = self.policy.rung_mode(rule, rung) if rule is not None and rung is not None else self.policy.mode
        self.decisions.append(
            Decision(
                kind="join", mode=mode, action_id=track.action_id, action=track.action, params=track.params,
                rule=track.rule, trouble=track.trouble, reason=why, by=by, status=status,  # type: ignore[arg-type]
            )
        )  # fmt: skip

    def _withdraw(self, track: Track, why: str) -> None:
        """End a question for the incident that it was asked for, so that others ask it anew; or for one of the others
        only."""
        asking, *others = self.state.tracks_of(track.action_id, "waiting")
        if asking.trouble.incident != track.trouble.incident:
            self._share(track, why)
            return
        self._record(track, "expired", why, track.action_id, track.action)
        for item in others:
            self._share(item, f"the question has ended for {track.trouble.incident}: {why}")
            self.state = self.state.with_track(replace(item, phase="open", is_due=True, asked_for=""))

    def _considered(self, rule: str, trouble: Trouble) -> str:
        """Why the rules before this one do not match the trouble."""
        names = [item.name for item in self.policy.rules]
        return passed_over(self.policy, trouble, self.view, names.index(rule)) if rule in names else ""

    def _record(self, track: Track, status: str, why: str, action_id: str, action: str, by: str = "") -> None:
        rule, rung = self._rule(track), self._rung(track)
        mode = self.policy.rung_mode(rule, rung) if rule is not None and rung is not None else self.policy.mode
        self.decisions.append(
            Decision(
                kind="record", mode=mode, action_id=action_id, action=action,
                params=track.params if action == track.action else {}, rule=track.rule, trouble=track.trouble,
                reason=why + (f" (next in turn because {track.why})" if track.why else ""), status=status, by=by,  # type: ignore[arg-type]
            )
        )  # fmt: skip

    def _verdict(self, track: Track, outcome: str, why: str) -> None:
        self.decisions.append(
            Decision(
                kind="verdict", action_id=track.action_id, action=track.action, rule=track.rule, trouble=track.trouble,
                outcome=outcome, reason=why,  # type: ignore[arg-type]
            )
        )  # fmt: skip


def join(*parts: str) -> str:
    """The non-empty parts as one sentence."""
    return "; ".join(part for part in parts if part)
