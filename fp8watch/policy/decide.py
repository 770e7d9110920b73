"""The decision: a pure function of policy, state and view.

One action at a time for a whole run: while one is on its way or settling nothing else is begun, because two
effects could not be told apart. At the end of the window the outcome is judged; without effect the rung is undone
(unless the next one builds on it) and the next is taken. What begins inside the window of an action of ours (the
bump after a switch to BF16) is that action's until the window ends. Non-finite parameters do not wait.
"""

from __future__ import annotations

from dataclasses import replace

from fp8watch.policy.budgets import refusal
from fp8watch.policy.fill import NotNow, fill
from fp8watch.policy.match import first_match
from fp8watch.policy.outcome import has_recovered, is_covered
from fp8watch.policy.recurrence import new_track, taken_up_again
from fp8watch.policy.rungs import Rung
from fp8watch.policy.schema import Policy, Rule, lower_mode
from fp8watch.policy.state import Decision, InForce, PolicyState, Track
from fp8watch.policy.view import Trouble, View

ACTIVE_STEPS = 2
"""A trouble not seen for longer is not acted on."""
AFTERMATH_STEPS = 5
"""What began inside a settling window must outlive it by so many steps before it is a trouble of its own."""
APPROVAL_STEPS = 1000
"""An action that nobody approved in so many steps is dropped."""
BUILDS_ON = frozenset({"rollback", "bf16_all", "halt"})
"""Before these the rung before is not undone: a rollback carries along what is in force."""


def decide(policy: Policy, state: PolicyState, view: View) -> tuple[PolicyState, list[Decision]]:
    """The next state and what is to be done and written down now."""
    turn = _Turn(policy, state, view)
    turn.undo_leftovers()
    turn.judge()
    turn.hear_people()
    turn.end_by_itself()
    turn.act()
    turn.try_returns()
    return turn.state, turn.decisions


class _Turn:
    """One call of `decide`: the state as it changes, and the decisions so far."""

    def __init__(self, policy: Policy, state: PolicyState, view: View) -> None:
        self.policy = policy
        self.state = state
        self.view = view
        self.decisions: list[Decision] = []
        self.is_busy = view.is_busy

    # Outcomes

    def undo_leftovers(self) -> None:
        if self.is_busy or not self.state.leftovers:
            return
        held, *others = self.state.leftovers
        self.state = replace(self.state, leftovers=tuple(others))
        self._revert(held, held.layers, "left over: not in force when read back, or without effect")

    def judge(self) -> None:
        for track in self.state.tracks:
            if track.phase != "settling" or self.view.seen < track.judge_at:
                continue
            rule = self._rule(track)
            if has_recovered(self.policy, self.view, track):
                self._verdict(track, "helped", "not seen in the second half of the settling window")
                track = replace(track, phase="done", helped=True, resolved_seen=self.view.seen)
                self.state = self.state.with_track(self._with_damage(track, rule))
            else:
                self._no_effect(track, rule, "still there at the end of the settling window")

    def _with_damage(self, track: Track, rule: Rule | None) -> Track:
        """Helped, but the loss is hurt and the next rung is there to mend it: it is due."""
        following = rule.ladder[track.rung + 1] if rule and track.rung + 1 < len(rule.ladder) else None
        if following is None or following.if_loss_above is None:
            return track
        excess = self.view.loss_excess(track.trouble.onset_step)
        if excess is None or excess <= following.if_loss_above:
            return track
        why = f"loss {excess:.1%} above its level before onset {track.trouble.onset_step}"
        return replace(track, phase="open", rung=track.rung + 1, is_due=True, why=why)

    def _no_effect(self, track: Track, rule: Rule | None, why: str) -> None:
        self._verdict(track, "no_effect", why)
        following = rule.ladder[track.rung + 1] if rule and track.rung + 1 < len(rule.ladder) else None
        blame = f"{track.action} had no effect: {why}"
        moved = replace(track, rung=track.rung + 1, phase="open", is_due=True, why=blame)
        held = next((item for item in self.state.in_force if item.action_id == track.action_id), None)
        keeps = following is not None and following.action in BUILDS_ON
        if held is not None and not keeps and self.is_busy:  # another command is on its way: undone after it
            self.state = replace(self.state, leftovers=(*self.state.leftovers, held))
        elif held is not None and not keeps:
            self._revert(held, held.layers, "no effect")
            moved = replace(moved, phase="undoing")
        self.state = self.state.with_track(moved)

    # People

    def hear_people(self) -> None:
        for track in self.state.tracks:
            if track.phase != "waiting":
                continue
            verdict = self.view.verdicts.get(track.action_id)
            if verdict == "refuse":
                self._close(track, "refused", "refused by a person")
            elif verdict == "approve":
                if self.is_busy or self.view.disarmed:
                    continue
                rung, rule = self._rung(track), self._rule(track)
                if rung is None or rule is None:
                    continue
                spent = self._refusal(rung)
                if spent is not None:
                    self._close(track, "refused", spent)
                    continue
                self._send(track, rule, rung, dict(track.params), "approved by a person")
            elif self.view.seen - track.decided_seen > APPROVAL_STEPS:
                self._close(track, "expired", f"nobody answered in {APPROVAL_STEPS} steps")

    def _close(self, track: Track, status: str, why: str) -> None:
        self._record(track, status, why, track.action_id, track.action)
        self.state = self.state.with_track(replace(track, phase="done", is_final=True))

    # Returns

    def end_by_itself(self) -> None:
        kept = tuple(item for item in self.state.in_force if item.ends_seen is None or self.view.seen < item.ends_seen)
        if len(kept) != len(self.state.in_force):
            self.state = replace(self.state, in_force=kept)

    def try_returns(self) -> None:
        if self.is_busy or self.view.disarmed or self._is_settling() or self.view.is_nonfinite_now:
            return
        if any(item.severity == "act" and self.view.age(item) <= ACTIVE_STEPS for item in self.view.troubles):
            return
        for held in self.state.in_force:
            if held.until_seen is not None and self.view.seen >= held.until_seen and not held.is_undoing:
                layers = held.layers[-1:] if held.action == "bf16_layers" else held.layers
                self._revert(held, layers, "trial return: the hold is over")
                return

    def _revert(self, held: InForce, layers: tuple[str, ...], why: str) -> None:
        params: dict[str, object] = {"layers": list(layers)} if held.action == "bf16_layers" else {}
        if held.action == "bf16_layers" and len(layers) < len(held.layers):
            # Not all of the layers: the command has an id of its own and names the action that it undoes in part.
            params["of"] = held.action_id
        self.decisions.append(
            Decision(
                kind="revert", action_id=held.action_id, action=held.action, params=params, rule=held.rule, reason=why
            )
        )
        self.is_busy = True
        undoing = replace(held, is_undoing=True, undoing_layers=layers)
        others = tuple(undoing if item.action_id == held.action_id else item for item in self.state.in_force)
        self.state = replace(self.state, in_force=others)

    # Acting

    def act(self) -> None:
        for rule, trouble, track in self._candidates():
            is_urgent = trouble.detector == "nonfinite" and self.view.is_nonfinite_now
            if not is_urgent and (self._is_settling() or self._is_aftermath(trouble, track)):
                continue
            if is_urgent and track.phase != "open":
                continue
            self._climb(rule, trouble, track)

    def _candidates(self) -> list[tuple[Rule, Trouble, Track]]:
        found: list[tuple[int, int, Rule, Trouble, Track]] = []
        present = {trouble.incident for trouble in self.view.troubles}
        for trouble in self.view.troubles:
            match = first_match(self.policy, trouble, self.view)
            track = self.state.track_of(trouble.incident)
            is_due = track is not None and track.is_due
            if match is None or (is_covered(self.state, trouble) and not is_due):
                continue
            position, rule = match
            is_active = self.view.age(trouble) <= ACTIVE_STEPS
            if track is None:
                if not is_active:
                    continue
                track, verdict = new_track(self.state, self.view, rule, trouble)
                if verdict is not None:
                    self._verdict(verdict, "no_effect", track.why)
                    self.state = self.state.with_track(replace(verdict, phase="done", resolved_seen=self.view.seen))
                self.state = self.state.with_track(track)
            else:
                track = taken_up_again(replace(track, trouble=trouble), rule, self.view)
                self.state = self.state.with_track(track)
            if track.phase == "open" and (track.is_due or is_active):
                found.append((position, trouble.onset_step, rule, trouble, track))
        for track in self.state.tracks:
            known = self._rule(track)
            if track.phase == "open" and track.is_due and known and track.trouble.incident not in present:
                position = self.policy.rules.index(known)
                found.append((position, track.trouble.onset_step, known, track.trouble, track))
        return [(rule, trouble, track) for _, _, rule, trouble, track in sorted(found, key=lambda item: item[:2])]

    def _is_settling(self) -> bool:
        return any(
            track.phase in {"sent", "undoing"} or (track.phase == "settling" and self.view.seen < track.block_until)
            for track in self.state.tracks
        )

    def _is_aftermath(self, trouble: Trouble, track: Track) -> bool:
        """Began in the window of an action of ours and has not outlived it."""
        if track.is_due:
            return False
        found_seen = self.view.seen - max(0, self.view.step - trouble.first_step)
        return any(
            other.applied_seen < found_seen <= other.block_until
            and self.view.seen < other.block_until + AFTERMATH_STEPS
            for other in self.state.tracks
            if other.action_id and other.applied_seen > 0 and other.trouble.incident != trouble.incident
        )

    def _climb(self, rule: Rule, trouble: Trouble, track: Track) -> None:
        mode = lower_mode(self.policy.mode, rule.mode)
        while track.rung < len(rule.ladder):
            rung = rule.ladder[track.rung]
            if (
                rung.action == "skip_update"
                and mode == "auto"
                and self.view.num_skipped == 0
                and not (self.view.is_nonfinite_now or self.view.params_nonfinite)
            ):
                # Not finite somewhere harmless (an amax), or over by now: there is no update to skip.
                break
            try:
                params, how = fill(self.policy, self.state, self.view, rung, trouble)
            except NotNow as error:
                if mode == "observe" and rung.action == "skip_update":
                    params, how = {}, "would be left out by the ranks' standing rule"
                else:
                    self._record(track, "unavailable", str(error), self._new_id(), rung.action)
                    track = replace(track, rung=track.rung + 1, is_due=True)
                    continue
            track = replace(track, params=params, action=rung.action, decided_seen=self.view.seen)
            if mode == "observe" or self.view.disarmed:
                self._announce("propose", track, rung, _join(track.why, how, self.view.disarmed), "observe")
                track = replace(track, phase="done", is_final=True)
                break
            spent = self._refusal(rung)
            if spent is not None:
                self._record(track, "refused", spent, self._new_id(), rung.action)
                if rung.action == "rollback":
                    track = replace(track, rung=track.rung + 1, is_due=True)
                    continue
                track = replace(track, phase="done", is_final=True)
                break
            if mode == "approve":
                action_id = self._announce("wait", track, rung, _join(track.why, how), "approve")
                track = replace(track, phase="waiting", action_id=action_id)
                break
            if rung.action == "skip_update":
                self._announce("apply", track, rung, _join(track.why, how), "auto")
                track = replace(track, phase="done", helped=True, resolved_seen=self.view.seen)
                break
            if self.is_busy:
                break
            self._send(track, rule, rung, params, _join(track.why, how))
            return
        if track.rung >= len(rule.ladder):
            track = replace(track, phase="done", is_final=True)
        self.state = self.state.with_track(track)

    def _send(self, track: Track, rule: Rule, rung: Rung, params: dict[str, object], why: str) -> None:
        action_id = track.action_id if track.phase == "waiting" else self._new_id()
        self.decisions.append(
            Decision(
                kind="apply", action_id=action_id, action=rung.action, params=params, rule=rule.name,
                trouble=track.trouble, mode=self.policy.rule_mode(rule), reason=why, rung=rung,
            )
        )  # fmt: skip
        self.is_busy = True
        self.state = self.state.with_track(
            replace(track, phase="sent", is_due=False, action_id=action_id, action=rung.action, params=params)
        )

    # Small things

    def _rule(self, track: Track) -> Rule | None:
        return next((rule for rule in self.policy.rules if rule.name == track.rule), None)

    def _rung(self, track: Track) -> Rung | None:
        rule = self._rule(track)
        return rule.ladder[track.rung] if rule and track.rung < len(rule.ladder) else None

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
        self.decisions.append(
            Decision(
                kind=kind, action_id=action_id, action=rung.action, params=track.params, rule=track.rule,  # type: ignore[arg-type]
                trouble=track.trouble, mode=mode, reason=why, rung=rung,  # type: ignore[arg-type]
            )
        )  # fmt: skip
        return action_id

    def _record(self, track: Track, status: str, why: str, action_id: str, action: str) -> None:
        rule = self._rule(track)
        mode = self.policy.rule_mode(rule) if rule is not None else self.policy.mode
        self.decisions.append(
            Decision(
                kind="record", mode=mode, action_id=action_id, action=action,
                params=track.params if action == track.action else {}, rule=track.rule, trouble=track.trouble,
                reason=_join(track.why, why), status=status,  # type: ignore[arg-type]
            )
        )  # fmt: skip

    def _verdict(self, track: Track, outcome: str, why: str) -> None:
        self.decisions.append(
            Decision(
                kind="verdict", action_id=track.action_id, action=track.action, rule=track.rule, trouble=track.trouble,
                outcome=outcome, reason=why,  # type: ignore[arg-type]
            )
        )  # fmt: skip


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
