"""The decision: a pure function of policy, state and view.

A run takes one action at a time: while one is on its way or settling nothing else is begun, because two effects could
not be told apart. At the end of the settling window the outcome is judged. Without effect the rung is undone (unless
the next one builds on it) and the next rung is taken. Trouble that begins inside the window of one of our actions (the
bump after a switch to BF16) belongs to that action until the window ends. Non-finite parameters do not wait.
"""

from __future__ import annotations

from dataclasses import replace

from fp8watch.action_words import NOBODY_ANSWERED
from fp8watch.policy import outcome
from fp8watch.policy.fill import NotNow, Params, fill
from fp8watch.policy.lr_return import why_lr_is_kept
from fp8watch.policy.match import first_match, passed_over
from fp8watch.policy.preconditions import why_quiet
from fp8watch.policy.questions import asked_already
from fp8watch.policy.recurrence import grown_serious, new_track, taken_up_again
from fp8watch.policy.rungs import Halt, Rung, Verify
from fp8watch.policy.schema import Policy, Rule, first_acting
from fp8watch.policy.state import Decision, InForce, PolicyState, Track
from fp8watch.policy.turn import Turn, join
from fp8watch.policy.view import Trouble, View
from fp8watch.records import Mode

ACTIVE_STEPS = 2
"""A trouble that was not seen for longer than this is not acted on."""
AFTERMATH_STEPS = 5
"""A trouble that began inside a settling window must outlive the window by this many steps to count as its own."""
CLIP_STEPS = 300
"""A clip limit has to be in force for this many steps before the share of clipped steps means anything."""


def decide(policy: Policy, state: PolicyState, view: View) -> tuple[PolicyState, list[Decision]]:
    """The next state, and what is to be done and recorded now."""
    turn = _Turn(policy, state, view)
    turn.undo_leftovers()
    turn.judge()
    turn.hear_people()
    turn.end_by_itself()
    turn.undo_stalls()
    turn.act()
    turn.try_returns()
    return turn.state, turn.decisions


class _Turn(Turn):
    """The stages of one decision, in the order in which `decide` calls them."""

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
            why = outcome.why_not_recovered(self.policy, self.view, track, self._rung(track))
            if why is None:
                self._verdict(track, "helped", self._why_helped(track))
                track = replace(track, phase="done", helped=True, is_damaged=False, resolved_seen=self.view.seen)
                self.state = self.state.with_track(self._with_damage(track, rule))
            else:
                self._no_effect(track, rule, why)

    def _why_helped(self, track: Track) -> str:
        if track.action in outcome.INSURANCE:
            return "in force"
        rung = self._rung(track)
        if rung is None or rung.verify == Verify():
            return "not seen in the second half of the settling window"
        loss = rung.verify.loss_within
        told = "" if loss is None else f", and the loss is within {loss:.0%} of before"
        return f"not seen in the last {rung.verify.quiet_share:.0%} of the settling window{told}"

    def _with_damage(self, track: Track, rule: Rule | None) -> Track:
        """Helped, but the loss is still damaged and the next rung is there to repair it: that rung is due."""
        for at in range(track.rung + 1, len(rule.ladder) if rule else 0):
            assert rule is not None
            if outcome.is_for_damage(self.view, rule.ladder[at], track.trouble):
                excess = self.view.loss_excess(track.trouble.onset_step)
                why = f"loss {excess:.1%} above its level before onset {track.trouble.onset_step}"
                return replace(track, phase="open", rung=at, is_due=True, why=why)
            if rule.ladder[at].mode != "observe":
                break
        return track

    def _no_effect(self, track: Track, rule: Rule | None, why: str) -> None:
        self._verdict(track, "no_effect", why)
        following = first_acting(rule, track.rung + 1)
        blame = f"{track.action} had no effect: {why}"
        moved = replace(track, rung=track.rung + 1, phase="open", is_due=True, helped=False, why=blame)
        held = next((item for item in self.state.in_force if item.action_id == track.action_id), None)
        rung = self._rung(track)
        keeps = outcome.is_kept_without_effect(rung, following) or self._is_wanted_by_another(track)
        if held is not None and not keeps and (wrong := why_lr_is_kept(held, self.view)) is not None:
            # The jumped rate on top of the trouble would be worse. Returned as any other, when the schedule is back.
            until = self.view.seen if held.until_seen is None else held.until_seen
            self._defer(replace(held, until_seen=until, had_no_effect=True), f"without effect, but {wrong}")
        elif held is not None and not keeps and self.is_busy:  # another command is on its way: undo it after that
            self.state = replace(self.state, leftovers=(*self.state.leftovers, held))
        elif held is not None and not keeps:
            self._revert(held, held.layers, "no effect")
            moved = replace(moved, phase="undoing")
        self.state = self.state.with_track(moved)

    def _is_wanted_by_another(self, track: Track) -> bool:
        """Whether the action was asked about for another incident too, which it has helped or may yet help, or whose
        next rung builds on it."""
        for item in self.state.tracks:
            if item.action_id != track.action_id or item.trouble.incident == track.trouble.incident:
                continue
            rung = first_acting(self._rule(item), item.rung)
            is_built_on = item.phase == "open" and rung is not None and rung.action in outcome.BUILDS_ON
            if item.phase == "settling" or item.helped or is_built_on:
                return True
        return False

    # People

    def hear_people(self) -> None:
        for track in self.state.tracks:
            rung, rule = self._rung(track), self._rule(track)
            if track.phase != "waiting" or rung is None or rule is None or track not in self._asking(track):
                continue
            approval = self.policy.approval_of(rule)
            verdict, by = self.view.verdicts.get(track.action_id), self.view.people.get(track.action_id, "")
            why = "approved by a person" if not by else f"approved by {by}"
            if verdict is None and self.view.seen - track.decided_seen > approval.timeout_steps:
                silence = f"{NOBODY_ANSWERED} in {approval.timeout_steps} steps"
                if approval.default == "refuse":
                    self._close(track, "expired", silence)
                    continue
                verdict, by, why = "approve", "the policy's default", f"{silence}: the policy's default is to apply it"
            if verdict == "refuse":
                self._close(track, "refused", "refused by a person" if not by else f"refused by {by}", by or "a person")
            elif verdict == "approve" and not (self.is_busy or self.view.disarmed):
                self._approved(track, rule, rung, why, by or "a person")

    def _asking(self, track: Track) -> list[Track]:
        """The track that a question was asked for; the others that wait for its answer get it from that one."""
        return self.state.tracks_of(track.action_id, "waiting")[:1]

    def _approved(self, track: Track, rule: Rule, rung: Rung, why: str, by: str) -> None:
        """Do it, unless the moment has passed: what was possible when the person was asked may not be any more."""
        spent = self._refusal(rung)
        if spent is not None and self.policy.budgets.when_spent == "observe":
            self._close(track, "refused", spent)
            return
        try:
            fill(self.policy, self.state, self.view, rung, track.trouble)
        except NotNow as error:
            self._close(track, "expired", f"approved, but no longer possible: {error}", by)
            return
        others = self.state.tracks_of(track.action_id, "waiting")[1:]
        self._send(track, rule, rung, dict(track.params), why, by)
        for item in others:
            self._share(item, why, by)
            self.state = self.state.with_track(replace(item, phase="sent", is_due=False))

    def _close(self, track: Track, status: str, why: str, by: str = "") -> None:
        self._record(track, status, why, track.action_id, track.action, by)
        for item in self.state.tracks_of(track.action_id, "waiting")[1:]:
            self._share(item, why, by, status)
            self.state = self.state.with_track(replace(item, phase="done", is_final=True))
        self.state = self.state.with_track(replace(track, phase="done", is_final=True))

    # Returns

    def end_by_itself(self) -> None:
        kept = tuple(item for item in self.state.in_force if item.ends_seen is None or self.view.seen < item.ends_seen)
        if len(kept) != len(self.state.in_force):
            self.state = replace(self.state, in_force=kept)

    def undo_stalls(self) -> None:
        """A clip limit of ours that fires all the time slows the run and cures nothing: undo it."""
        rate = self.view.clip_rate
        for held in self.state.in_force:
            limit = held.undo_above_clip_rate
            is_old = self.view.seen - held.since_seen >= CLIP_STEPS
            if self.is_busy or self.view.disarmed or rate is None or limit is None or held.is_undoing or not is_old:
                continue
            if rate > limit:
                self._revert(held, held.layers, f"{rate:.0%} of {CLIP_STEPS} steps clipped, over {limit:.0%}: a stall")

    def try_returns(self) -> None:
        if self.is_busy or self.view.disarmed or self._is_settling() or self.view.is_nonfinite_now:
            return
        # A rollback blocks for its window and is judged after the replay: what is in force is there for the replay.
        if any(track.phase == "settling" for track in self.state.tracks):
            return
        if any(item.severity == "act" and self.view.age(item) <= ACTIVE_STEPS for item in self.view.troubles):
            return
        for held in self.state.in_force:
            if held.until_seen is None or self.view.seen < held.until_seen or held.is_undoing:
                continue
            if (why := why_lr_is_kept(held, self.view)) is not None:
                self._defer(held, f"the hold is over, but {why}")
                continue
            layers = held.layers[-1:] if held.action == "bf16_layers" else held.layers
            why = "no effect, and the schedule is back" if held.had_no_effect else "trial return: the hold is over"
            self._revert(held, layers, why, is_trial=not held.had_no_effect)
            return

    def _defer(self, held: InForce, why: str) -> None:
        """Write down, once, why an action is kept that would be undone."""
        if held.is_deferred:
            return
        self.decisions.append(
            Decision(
                kind="note", action_id=held.action_id, action=held.action, rule=held.rule, trouble=held.trouble,
                reason=why,
            )
        )  # fmt: skip
        self.state = self.state.with_held(replace(held, is_deferred=True))

    # Acting

    def act(self) -> None:
        for rule, trouble, track in self._candidates():
            is_urgent = trouble.detector == "nonfinite" and self.view.is_nonfinite_now
            if is_urgent and track.phase != "open":
                continue
            why = None if is_urgent else self._why_held_back(trouble, track)
            if why is not None:
                self._note(trouble, rule.name, why)
                continue
            self._climb(rule, trouble, track)

    def _why_held_back(self, trouble: Trouble, track: Track) -> str | None:
        if self._is_settling():
            return "an action is under way or settling: two effects could not be told apart"
        if self._is_aftermath(trouble, track):
            return "began in the window of an action of ours and has not outlived it"
        return why_quiet(self.policy.quiet, self.view, trouble)

    def _candidates(self) -> list[tuple[Rule, Trouble, Track]]:
        found: list[tuple[int, int, Rule, Trouble, Track]] = []
        present = {trouble.incident for trouble in self.view.troubles}
        for trouble in self.view.troubles:
            match = first_match(self.policy, trouble, self.view)
            track = self.state.track_of(trouble.incident)
            is_due = track is not None and track.is_due
            if match is None:
                if track is None:
                    why = passed_over(self.policy, trouble, self.view)
                    self._note(trouble, "", f"no rule has it: {why}" if why else "no rule speaks of it")
                continue
            if outcome.is_covered(self.state, trouble) and not is_due:
                self._note(trouble, match[1].name, "covered by an action that is in force")
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
                track = taken_up_again(self.state, replace(track, trouble=trouble), rule, self.view)
                grown = grown_serious(track, self._rule(track), rule, self.view)
                if track.phase == "waiting" and grown is not track:
                    self._withdraw(track, f"the trouble has grown: rule {rule.name} has it now")
                track = grown
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
        """Whether a trouble began in the window of one of our actions and has not outlived it."""
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
        """Take the first rung that can be taken, starting where the track stands."""
        due = track.rung
        while track.rung < len(rule.ladder):
            rung = rule.ladder[track.rung]
            is_wanted = (
                outcome.is_for_damage(self.view, rung, trouble) if track.rung > due else rung.if_loss_above is not None
            )
            if track.helped and not is_wanted:
                if rung.mode == "observe":
                    track = replace(track, rung=track.rung + 1)
                    continue
                track = replace(track, rung=track.rung - 1, phase="done", is_due=False, is_damaged=True)
                break
            mode = self.policy.rung_mode(rule, rung)
            if mode == "auto" and rung.action == "skip_update" and self._has_nothing_to_skip():
                break
            try:
                params, how = self._fill(rung, trouble, mode)
            except NotNow as error:
                self._record(track, "unavailable", str(error), self._new_id(), rung.action)
                track = replace(track, rung=track.rung + 1, is_due=True)
                continue
            reached = track
            track = replace(track, params=params, action=rung.action, decided_seen=self.view.seen, asked_for="")
            if mode == "observe" or self.view.disarmed:
                self._announce("propose", track, rung, join(track.why, how, self.view.disarmed), "observe")
                if mode == "observe" and self.policy.rule_mode(rule) != "observe":  # this rung alone only observes
                    track = replace(reached, rung=track.rung + 1, is_due=True)
                    continue
                track = replace(track, phase="done", is_final=True)
                break
            spent = self._refusal(rung)
            when_spent = self.policy.budgets.when_spent
            if spent is not None and (when_spent == "approve" or (when_spent == "halt" and mode == "approve")):
                mode, how = "approve", join(how, spent)
            elif spent is not None:
                self._record(track, "refused", spent, self._new_id(), rung.action)
                if rung.action == "rollback":
                    track = replace(track, rung=track.rung + 1, is_due=True)
                    continue
                if when_spent == "halt" and self._halt(track, rule, trouble, spent):
                    return
                track = replace(track, phase="done", is_final=True)
                break
            asked = asked_already(self.policy, self.state, rung, params, trouble) if mode == "approve" else None
            if asked is not None:
                track = self._join(track, asked)
                break
            if mode == "approve":
                action_id = self._announce("wait", track, rung, join(track.why, how), "approve")
                track = replace(track, phase="waiting", action_id=action_id)
                break
            if rung.action == "skip_update":
                self._announce("apply", track, rung, join(track.why, how), "auto")
                track = replace(track, phase="done", helped=True, resolved_seen=self.view.seen)
                break
            if self.is_busy:
                break
            self._send(track, rule, rung, params, join(track.why, how))
            return
        if track.rung >= len(rule.ladder):
            # What has helped is taken up again, or held longer, when its trouble comes back: nothing more was done.
            last = len(rule.ladder) - 1
            track = (
                replace(track, rung=last, phase="done", is_due=False, is_damaged=True) if track.helped else
                replace(track, phase="done", is_final=True)
            )  # fmt: skip
        self.state = self.state.with_track(track)

    def _has_nothing_to_skip(self) -> bool:
        """Not finite somewhere harmless (an amax), or already over: there is no update to skip."""
        return self.view.num_skipped == 0 and not (self.view.is_nonfinite_now or self.view.params_nonfinite)

    def _fill(self, rung: Rung, trouble: Trouble, mode: Mode) -> tuple[Params, str]:
        """`fill`, with the exceptions of `skip_update`, which the ranks carry out by themselves. Raises `NotNow`."""
        if rung.action == "skip_update" and mode == "approve":
            raise NotNow("a standing rule of the ranks cannot wait for a person")
        try:
            return fill(self.policy, self.state, self.view, rung, trouble)
        except NotNow:
            if rung.action == "skip_update" and mode == "observe":
                return {}, "would be left out by the ranks' standing rule"
            raise

    def _halt(self, track: Track, rule: Rule, trouble: Trouble, why: str) -> bool:
        """Halt the run because its budget is spent; False: this run cannot be halted now."""
        rung = Halt(action="halt")
        try:
            params, _ = fill(self.policy, self.state, self.view, rung, trouble)
        except NotNow:
            return False
        if self.is_busy:
            return False
        self._send(track, rule, rung, params, why)
        return True
