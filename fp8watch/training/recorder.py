"""What one optimizer step was like: gathered around `optimizer.step` and at the boundary, handed to the ring.

Everything runs on the training thread, is kept away from training by the guard, and waits for no device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fp8watch.actions.clip_control import ClipControl
from fp8watch.actions.lr_control import LrControl
from fp8watch.actions.skip_guard import SkipGuard
from fp8watch.capture import frames, gradients
from fp8watch.capture.aliases import aliases
from fp8watch.capture.closer import CloserLook, CloserOptions
from fp8watch.capture.flight_check import MOST_NAMES, FlightCheck
from fp8watch.capture.frames import LayoutBook, StepNote
from fp8watch.capture.missing_gradients import PATIENCE, MissingGradients
from fp8watch.capture.ring import Ring
from fp8watch.capture.scalars import NotAScalar, StepScalars, as_flag, as_rate, as_scalar, is_given
from fp8watch.capture.source import Reading, Source
from fp8watch.capture.update_size import UpdateSize, UpdateSums
from fp8watch.foreign import attribute
from fp8watch.records import Layout
from fp8watch.training.guard import Guard
from fp8watch.training.observed import Observed
from fp8watch.training.report import listed
from fp8watch.transport.pending import PendingFrame

BYTES_A_TENSOR = 208
"""All columns of one tensor with their validity, rounded up: six f4, six u8, one u1, thirteen flags; on a what-if step
ten u8, five f4 and fifteen flags more."""


UPDATE_EVERY = 10
"""Optimizer steps between looks at the size of the update on an accelerator, where each look costs the training thread
about as much as everything else together; on a CPU it is looked at in every step."""


class Recorder:
    """Watches one model and optimizer; a `fp8watch.training.stepping.StepObserver`."""

    def __init__(
        self,
        *,
        run: str,
        rank: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: Any,
        lr: LrControl,
        clip: ClipControl,
        skip: SkipGuard,
        sources: list[Source],
        unseen: list[str],
        guard: Guard,
        note: Callable[[str], None],
        may_act: Callable[[], bool],
        modules: Sequence[str] = (),
        statistics_every: int | None,
        closer: CloserOptions | None = None,
    ) -> None:
        self._run, self._rank = run, rank
        self._optimizer, self._scaler = optimizer, scaler
        self._lr, self._clip, self._skip = lr, clip, skip
        self._source = sources[0] if sources else None
        self._begin_part, self._read_part = (
            (f"{self._source.name} begin", f"{self._source.name} read") if self._source else ("closer look begin", "")
        )
        self._guard, self._note, self._may_act = guard, note, may_act
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._update_size = UpdateSize(model.parameters())
        self._update_every = 1 if device.type == "cpu" else UPDATE_EVERY
        self._num_updates = 0
        self._flight: FlightCheck | None = FlightCheck(model)
        self.scalars = StepScalars()
        book = LayoutBook(run, rank, guard.call("aliases", aliases, model))
        self.observed = Observed(book, self._source, unseen=unseen, guard=guard, note=note)
        self._missing = MissingGradients(model, optimizer)
        self._update: UpdateSums | None = None
        self._miss = self.observed.not_observed
        self.observed.refresh(0)
        self.closer = CloserLook(
            model=model, optimizer=optimizer, source=self._source, modules=modules, device=device,
            options=closer or CloserOptions(statistics_every=statistics_every),
            not_observed=self.observed.not_observed_quietly,
        )  # fmt: skip
        slot_bytes = 4096 + BYTES_A_TENSOR * len(self.layout.columns)
        self._ring: Ring[StepNote] = Ring(device, slot_bytes=slot_bytes)
        self.own_seconds = 0.0
        """Spent inside fp8watch on the training thread since the last `finish`; whoever spends any adds to it."""
        self._was_updated = False
        self._is_entered = False
        self._is_skip_at_rest = True
        self._norm_is_scaled = False
        self._last_boundary: float | None = None
        self.begin(1)

    # Around optimizer.step

    def before_update(self, *, has_closure: bool) -> bool:
        """See `StepObserver`. Clips where a remedy asks for it and the loop does not, then decides about a skip."""
        started = time.perf_counter()
        self._was_updated = True
        guard = self._guard
        if self._flight is not None and self._flight.is_due:
            self.scalars.put("bad_parameters", guard.call("flight check", self._flight.start))
        is_skipped, is_clipping = False, not self._clip.is_at_rest
        is_skip_at_rest = self._is_skip_at_rest = self._skip.is_at_rest  # until the next boundary
        if not has_closure:
            # Nearly always neither has anything to do: training is not made to pay for asking them.
            if is_clipping:
                guard.call("clip", self._clip.before_step)
                if self._clip.failure is not None:
                    self._miss("clip", f"clipping before the optimizer step failed: {self._clip.failure}")
            if not is_skip_at_rest:
                may_act = self._may_act()
                if may_act or self._skip.ask_peers is not None:
                    is_skipped = bool(guard.call("skip_update", self._skip.before_step, may_act=may_act))
                if self._skip.failure is not None:
                    self._miss("skip_update", f"the guard failed: {self._skip.failure}")
            if not self._clip.has_current:  # else taken when the loop clipped
                guard.call("grad_norm", self._take_norm)
            if self._missing.count():
                guard.call("missing gradients", self._miss_gradients)
        elif self._skip.is_armed:
            self._miss("skip_update", "optimizer.step is given a closure, which makes the gradients inside it")
        if is_clipping:
            self._clip.release()
        if is_skipped:
            guard.call("skip_update end", self._skip.after_step)
        else:
            if self._num_updates % self._update_every == 0:
                guard.call("update_rms begin", self._update_size.before)
            self._num_updates += 1
        self.own_seconds += time.perf_counter() - started
        return is_skipped

    def enter_update(self) -> None:
        """See `StepObserver`: the LR factor goes in."""
        self._is_entered = True
        # What cannot be taken back is not put in.
        if not self._lr.is_at_rest and "learning_rate end" not in self._guard.disabled:
            self._guard.call("learning_rate", self._lr.enter)

    def leave_update(self) -> None:
        """See `StepObserver`: the user's own LR objects come back, and the optimizer is left as it was."""
        self._guard.call("learning_rate end", self._lr.leave)
        if attribute(self._optimizer, "found_inf") is not None:
            self._guard.call("update_skipped", self._take_skipped)
        if not self._is_skip_at_rest:
            self._guard.call("skip_update end", self._skip.after_step)

    def after_update(self, *, has_closure: bool) -> None:
        """See `StepObserver`."""
        started = time.perf_counter()
        self._update = None
        if self._update_size.has_before:
            self._update = self._guard.call("update_rms", self._update_size.after)
        if has_closure:
            self._guard.call("clip", self._clip.after_closure)
            if not self._clip.has_current:
                self._guard.call("grad_norm", self._take_norm)
            if self._missing.count():
                self._guard.call("missing gradients", self._miss_gradients)
        self.own_seconds += time.perf_counter() - started

    def note_clip(self) -> None:
        """The loop is about to clip: are its gradients unscaled?"""
        if self._scaler is None and attribute(self._optimizer, "grad_scale") is None:
            self._norm_is_scaled = False  # as nearly always
            return
        self._norm_is_scaled = bool(
            self._guard.call("grad_norm scale", gradients.is_scaled, self._optimizer, self._scaler)
        )

    def _take_norm(self) -> None:
        if gradients.is_scaled(self._optimizer, self._scaler):
            self._miss("grad_norm", gradients.SCALED)
            return
        found = gradients.total_norm(self._optimizer)
        if isinstance(found, str):
            self._miss("grad_norm", found)
        elif found is None:
            self._miss("grad_norm", "the optimizer made an update without any gradient")
        else:
            self.scalars.put("grad_norm", found)

    def _miss_gradients(self) -> None:
        if names := self._missing.look():
            self._miss(
                f"gradient of {listed(names, MOST_NAMES)}", f"none in {PATIENCE} updates, though trained: is it used?"
            )

    def _take_skipped(self) -> None:
        found_inf = attribute(self._optimizer, "found_inf")
        if isinstance(found_inf, torch.Tensor):
            self.scalars.put("update_skipped", (found_inf > 0).to(torch.float32).reshape(()))

    # At the boundary

    def begin(self, step: int) -> None:
        """A new step starts."""
        self._guard.call(self._begin_part, self.closer.begin, step)
        if self._guard.is_failing(self._begin_part):  # a step that has begun can be read all the same
            self._guard.call(f"{self._begin_part} without samples", self.closer.begin_plainly)

    def give(self, values: Mapping[str, Any]) -> None:
        """What only the loop knows of the step; see `StepScalars.give`."""
        for name, reason in self.scalars.give(values).items():
            self._miss(name, reason)

    def micro_loss(self, loss: Any) -> None:
        """One micro-batch's loss."""
        try:
            self.scalars.micro_loss(loss)
        except NotAScalar as error:
            self._miss("loss", str(error))

    def finish(self, loss: Any, *, step: int, attempt: int, tokens: Any, samples: float | None) -> None:
        """The step is over: take its numbers and start their copy to the host. `loss`, `tokens`: as given."""
        started = time.perf_counter()
        updates = max(1, self.scalars.num_micro_batches)
        self._guard.call("loss", self._take_loss, loss)
        if loss is None and not self.scalars.has("loss"):
            self._miss("loss", "watch.step was called without a loss")
        if tokens is not None:
            self._guard.call("tokens", self._take_tokens, tokens)
        if samples is not None:
            self.scalars.values["samples"] = samples
        self._guard.call("scalars", self._take_scalars)
        reading = self._guard.call(self._read_part, self._source.read) if self._source is not None else None
        step_seconds = None if self._last_boundary is None else started - self._last_boundary
        if step_seconds is not None:
            self.scalars.values["step_seconds"] = step_seconds
            self.closer.governor.step_took(step_seconds)
        if not self.closer.is_at_rest:
            found = self._guard.call("closer look", self.closer.finish, reading, self.observed.columns)
            if found is not None:
                reading = found[0]
                self.scalars.values.update(found[1])
        if self._flight is not None:
            self._guard.call("flight check", self._land)
        self.observed.refresh_if_due(step, attempt)
        self._last_boundary = started
        self._guard.call("ring", self._push, reading, step, attempt, started, updates)
        if self.scalars.values:  # the ring is off: nothing of the step may be kept, a loss holds its graph
            self.scalars.take()

    def _land(self) -> None:
        """The names of parameters that were bad before the first update, when they have arrived."""
        checked = None if self._flight is None or self._flight.is_due else self._flight.take()
        if checked is None:
            return
        self._flight = None
        for name in checked.nonfinite[:MOST_NAMES]:
            self.scalars.put(f"bad_parameter:{name}", 1.0)
        if checked.nonfinite:
            names = listed(checked.nonfinite, MOST_NAMES)
            self._note(f"before the first update {names} held NaN or infinity: bad before training")
        if checked.zero:
            names = listed(checked.zero, MOST_NAMES)
            self._note(f"before the first update {names} held nothing but zeros (adapters start so)")

    def _take_loss(self, loss: Any) -> None:
        try:
            self.scalars.loss(loss)
        except NotAScalar as error:
            self._miss("loss", str(error))

    def _take_tokens(self, tokens: Any) -> None:
        # A device tensor stays one: asking for its value would wait for the device.
        try:
            self.scalars.put("tokens", as_scalar(tokens, "tokens"))
        except NotAScalar as error:
            self._miss("tokens", str(error))

    def _push(self, reading: Reading | None, step: int, attempt: int, started: float, updates: int) -> None:
        # What is spent from here on, sending included, counts for the next step: the sum over steps is exact.
        self.scalars.values["overhead_seconds"] = self.own_seconds + time.perf_counter() - started
        self.own_seconds = 0.0
        host, device = self.scalars.take()
        update, self._update = self._update, None
        note = StepNote(
            step=step, attempt=attempt, layout=self.layout, time_unix=time.time(), scalars=host,
            updates_forward=reading.updates_forward if reading is not None else updates,
            updates_backward=reading.updates_backward if reading is not None else updates,
            zero_is_unseen=reading is not None and reading.zero_is_unseen,
            places=reading.places if reading is not None else None,
            num_update_elements=update.num_elements if update is not None else 0,
        )  # fmt: skip
        try:
            self._ring.push(frames.device_values(device, reading, update), note)
        except Exception as error:
            # One tensor from the loop must not cost the step: try what is our own, which raises if it is at fault.
            own = {name: value for name, value in device.items() if not is_given(name)}
            if len(own) == len(device):
                raise
            self._ring.push(frames.device_values(own, reading, update), note)
            for name in device.keys() - own.keys():
                self._miss(name, f"its tensor cannot be copied with the step ({type(error).__name__})")

    def _take_scalars(self) -> None:
        values = self.scalars.values
        reading = self._clip.take()
        if reading is not None:
            if self._norm_is_scaled and reading.by_user:
                self._miss("grad_norm", gradients.SCALED)
            else:
                values["grad_norm"] = reading.norm
            if reading.limit is not None:
                values["clip_limit"] = reading.limit
        self._norm_is_scaled = False
        if self._scaler is not None and isinstance(scale := attribute(self._scaler, "_scale"), torch.Tensor):
            values["loss_scale"] = scale
        if self._was_updated:
            if self._is_entered:  # a skipped update used no learning rate
                self.scalars.put("learning_rate", as_rate(self._lr.first))
                self.scalars.put("lr_factor", self._lr.factor())
            if "update_skipped" not in values:
                values["update_skipped"] = 0.0 if self._is_skip_at_rest else as_flag(self._skip.last_skipped)
        elif gradients.has_scaler(self._scaler):
            values["update_skipped"] = 1.0
        else:
            self._miss("learning_rate", "optimizer.step was not seen between two watch.step calls")
        if "learning_rate" not in values:
            groups = self._optimizer.param_groups
            self.scalars.put("learning_rate", as_rate(groups[0].get("lr")) if groups else None)
        self._was_updated = self._is_entered = False

    @property
    def layout(self) -> Layout:
        """The layout in force."""
        return self.observed.layout

    def poll(self, *, wait: bool = False) -> list[PendingFrame]:
        """Frames of the steps whose numbers have arrived; `wait` only where training stands still anyway."""
        return [
            PendingFrame(frames.FrameParts(run=self._run, rank=self._rank, note=note, values=values), note.step)
            for note, values in self._ring.poll(wait=wait)
        ]

    @property
    def dropped(self) -> int:
        """Steps that never got into the ring."""
        return self._ring.dropped

    def forget(self) -> None:
        """A rollback: what was collected of the step under way belongs to a timeline that is given up."""
        self.scalars.take()
        self._clip.take()
        self._was_updated = self._is_entered = False
        self._norm_is_scaled = False
        self._update = None

    def restart_clock(self) -> None:
        """The time since the last boundary went into saving or restoring: it is no step's."""
        self._last_boundary = time.perf_counter()

    def detach(self) -> None:
        """Leave no hook behind."""
        self._guard.call("ring detach", self._ring.poll, wait=True)  # no kernel may write to memory that is given back
        self._guard.call("closer look detach", self.closer.detach)
        if self._source is not None:
            self._guard.call(f"{self._source.name} detach", self._source.detach)
