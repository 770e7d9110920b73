"""`Watch`: what `fp8watch.attach` returns and a training loop talks to.

Invariants: no method raises into training (but `Halted`, and what torch itself raises in `clip_grad_norm_`), none
waits for a device, an agent or a disk in an ordinary step; parameters, gradients and random generators are only
ever read, unless an action that the policy allows is being applied.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from fp8watch.errors import CheckpointError, Halted, RanksApart
from fp8watch.records import Command, Evaluation, Goodbye, Inquiry, LedgerUpdate
from fp8watch.training.boundary import Boundary
from fp8watch.training.data import Batches
from fp8watch.training.resume import refuse_together, resume_alone, resume_together
from fp8watch.training.session import Session

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
"""What `detach` may wait for the last frames to be sent: an agent that was just started on a busy machine needs it."""


class Watch:
    """One watched model and optimizer. Made by `fp8watch.attach`."""

    def __init__(self, session: Session, boundary: Boundary) -> None:
        self._session = session
        self._boundary = boundary
        self._guard = session.guard
        self._recorder = session.recorder
        self._pid = os.getpid()
        self._is_detached = False
        self._ended: Halted | None = None
        # By identity, since a list can be neither hashed nor held weakly. A loop's iterator keeps its `Batches`, and
        # with it the loader; what no loop iterates any more goes, but for the newest and the one of rollbacks.
        self._batches: weakref.WeakValueDictionary[int, Batches] = weakref.WeakValueDictionary()
        self._newest_batches: Batches | None = None
        self._num_off = 0

    # What a person may look at

    @property
    def run(self) -> str:
        """Name of the run."""
        return self._session.identity.run

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self._session.identity.rank

    @property
    def global_step(self) -> int:
        """Optimizer updates done in this timeline; a rollback rewinds it."""
        return self._session.step

    @property
    def attempt(self) -> int:
        """Grows by one at each rollback and restart."""
        return self._session.attempt

    @property
    def capabilities(self) -> dict[str, str]:
        """Action -> empty when it is available in this run, else the reason why it is not."""
        return dict(self._session.capabilities())

    @property
    def not_observable(self) -> list[str]:
        """`name: reason` of what cannot be seen."""
        return list(self._recorder.layout.not_observable)

    @property
    def is_attached(self) -> bool:
        """False after `detach`."""
        return not self._is_detached

    @property
    def failures(self) -> dict[str, int]:
        """fp8watch's own failures so far, by part."""
        return dict(self._guard.failures)

    def note_once(self, text: str) -> None:
        """Say something to the person who trains, unless it was said before."""
        self._session.note(text)

    # What the loop calls

    def resume(self) -> int:
        """Restore the newest checkpoint that is not tainted, if there is any; the step to go on from.

        With several ranks all of them call it, and get the newest one that every rank finds sound. Raises
        `CheckpointError`, with nothing overwritten, when there are checkpoints and none can be used, or when their
        directory cannot be (another run saves there): training from the beginning unasked would be worse.
        """
        session, manager = self._session, self._session.context.checkpoints
        if manager is None and session.cannot_resume:
            refuse_together(session.peers, session.cannot_resume, session.agreement_seconds)
        if manager is None or self._is_detached:
            session.note("resume: attach was given no checkpoints")
            return self.global_step
        if manager.world_size == 1:
            found = resume_alone(manager, session.attempt)
        elif session.peers is None:
            raise CheckpointError("resume: several ranks need an initialised torch.distributed to agree where to go on")
        else:
            found = resume_together(manager, session.peers, session.attempt, session.agreement_seconds)
        if found is None:
            session.note(
                f"resume: there is no checkpoint in {manager.root}; training begins at step {self.global_step}"
            )
            return self.global_step
        report = found.report
        for text in report.notes:
            session.note(f"resume: {text}")
        if not report.data_restored:
            logger.warning("fp8watch: resume: no data position was restored; give attach the dataloader")
        logger.warning("fp8watch: resumed from %s (step %d)", report.checkpoint, report.step)
        self._guard.call("resume", session.resumed, report.step, found.record, found.attempt)
        return self.global_step

    def batches(self, loader: Iterable[Any]) -> Iterable[Any]:
        """The loader's batches, unchanged, with a position that a rollback can restore."""
        known = self._batches.get(id(loader))
        if known is None or known.loader is not loader:
            data = self._session.context.parts.data
            known = data if isinstance(data, Batches) and data.loader is loader else Batches(loader)
            self._batches[id(loader)] = known
            self._newest_batches = known
            if data is None:
                self._session.set_data(known)
            elif data is not known:
                self._session.note("batches: a rollback restores the position of attach's dataloader, not of this one")
        return known

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_`, with the lower of this limit and the one a remedy has set.

        With a `mesh=` that has pipeline stages the norm is that of all stages: all of them call it.
        Returns the norm before clipping, a 0-D tensor. Raises what torch raises.
        """
        clip = self._session.context.clip
        if self._is_detached:
            return clip.clip(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        self._recorder.note_clip()
        return clip.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)

    def micro_step(self, loss: Any) -> None:
        """One micro-batch of an accumulated step is done: its loss counts for the mean that `step` records."""
        if self._is_detached:
            return
        started = time.perf_counter()
        self._guard.call("loss", self._recorder.micro_loss, loss)
        self._recorder.own_seconds += time.perf_counter() - started

    def step(self, loss: Any = None, tokens: float | torch.Tensor | None = None) -> None:
        """The step boundary, after `optimizer.step()` (and the scheduler's): record, apply what is due, save.

        `loss`: the raw loss, as a tensor of one element on any device, a float or a numpy scalar; after
        `micro_step` calls it is not looked at. `tokens`: tokens of this step, a number or a tensor of one element on
        any device, which is not waited for; None: counted in the batches seen.
        Raises `Halted` when the policy stops the run (`RanksApart`, a kind of it, when ranks may be in different
        states), and again whenever it is called after that; nothing else.
        """
        if self._is_detached or os.getpid() != self._pid:
            if self._ended is not None and os.getpid() == self._pid:
                raise type(self._ended)(self._ended.reason)  # the loop has caught it and gone on
            return
        started = time.perf_counter()
        session = self._session
        self._guard.call("capture", self._record, loss, tokens)
        session.step += 1
        if len(self._guard.disabled) != self._num_off:  # what is off is said in the layout, also when that is capture
            self._num_off = len(self._guard.disabled)
            self._recorder.observed.refresh(session.attempt)
        self._guard.call("frames", session.send_frames)
        if session.uplink.has_news:
            self._guard.call("replies", self._take_replies)
        self._recorder.own_seconds += time.perf_counter() - started
        if self._boundary.is_due:
            is_idle = self._boundary.is_idle
            started = time.perf_counter()
            self._guard.call("boundary", self._boundary.run, session.step)
            if session.boundary_off is not None:
                self._guard.call("refusals", self._boundary.leave, session.step, session.boundary_off)
            if is_idle:  # waited for the other ranks' votes only: that belongs to the step
                self._recorder.own_seconds += time.perf_counter() - started
            else:
                self._recorder.restart_clock()
        if session.context.checkpoints is not None:
            self._guard.call("checkpoints", session.maybe_save)
        self._recorder.begin(session.step + 1)
        if session.context.halt_reason is not None:
            self._halt(session.context.halt_reason)
        if session.stop_reason is not None:
            self._stop(session.stop_reason)

    def look_closer(self, modules: Sequence[str]) -> None:
        """Look at these FP8 layers (qualified names) in the coming steps: what their tensors would lose under other
        recipes, and, one layer a step, the GEMM again in BF16. Unknown names are passed over."""
        if not self._is_detached:
            self._guard.call("look_closer", self._look_closer, modules)

    def record(self, **values: Any) -> None:
        """Give what only the loop knows of the step under way, for its detectors: `attention_logit_max`, `kurtosis`,
        `zero_grad_ratio`, each a scalar on any device or a mapping from module names to scalars."""
        if not self._is_detached:
            self._guard.call("record", self._recorder.give, values)

    def evaluation(self, scores: Mapping[str, Any]) -> None:
        """Record evaluation scores, each one number, at the present step."""
        if not self._is_detached:
            self._guard.call("evaluation", self._send_evaluation, scores)

    def detach(self, reason: str = "detached") -> None:
        """Leave the model, optimizer and process as they were found; sends what is left first. Idempotent."""
        if self._is_detached:
            return
        self._is_detached = True
        if os.getpid() == self._pid:
            self._guard.call("detach", self._session.agreement.leave, self._session.step)
            self._guard.call("detach", self._boundary.leave, self._session.step)
            self._guard.call("checkpoints", self._session.finish_saving)
            self._guard.call("detach", self._send_last, reason)
        self._guard.call("detach", self._session.detach)

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.detach("end" if kind is None else f"error: {kind.__name__}")

    # Parts of a step

    def _look_closer(self, modules: Any) -> None:
        if isinstance(modules, str):
            modules = [modules]
        if not isinstance(modules, Iterable):
            self._session.note(f"look_closer: {type(modules).__name__} given, names of modules are wanted")
            return
        self._recorder.closer.ask([name for name in modules if isinstance(name, str)])

    def _record(self, loss: Any, tokens: Any) -> None:
        data = self._session.context.parts.data
        samples: float | None = None
        if isinstance(data, Batches):
            data.note_boundary()
            if (data.unavailable is None or data.samples) and "samples" not in data.uncounted:
                samples = float(data.samples)
        if self._batches:
            counted = self._count_tokens(list(self._batches.values()))
            tokens = counted if tokens is None else tokens
        self._recorder.finish(
            loss,
            step=self._session.step + 1,
            attempt=self._session.attempt,
            tokens=tokens,
            samples=samples,
        )

    def _count_tokens(self, known: list[Batches]) -> float | torch.Tensor | None:
        """Tokens of the batches seen in this step; None if they cannot be counted."""
        counted = [n for batches in known if (n := batches.take_tokens()) is not None]
        for batches in known:
            for name, reason in batches.uncounted.items():
                self._recorder.observed.not_observed(name, reason)
            if batches.remark is not None:
                self._session.note(batches.remark)
        return sum(counted) if counted else None

    def _take_replies(self) -> None:
        self._session.uplink.say_notes(is_unwritable_known=self._session.journal.unavailable is not None)
        for reply in self._session.uplink.take():
            if isinstance(reply, Command):
                self._boundary.receive(reply)
            elif isinstance(reply, LedgerUpdate):
                self._guard.call("checkpoint label", self._session.label, reply)
            elif isinstance(reply, Inquiry) and reply.attempt == self._session.attempt:
                self.look_closer(reply.modules)

    def _send_evaluation(self, scores: Mapping[str, Any]) -> None:
        session = self._session
        values = {}
        if not isinstance(scores, Mapping):
            session.note(f"evaluation: {type(scores).__name__} given, a mapping from names to numbers is wanted")
            return
        for name, value in scores.items():
            try:
                values[str(name)] = float(value)
            except (TypeError, ValueError, OverflowError, RuntimeError):
                session.note(f"evaluation: {name} is {type(value).__name__}, one number is wanted")
        if values:
            session.uplink.send(Evaluation(run=self.run, attempt=session.attempt, step=session.step, scores=values))

    def _send_last(self, reason: str) -> None:
        self._session.send_frames(wait=True)
        self._session.uplink.send(Goodbye(run=self.run, rank=self.rank, step=self.global_step, reason=reason))
        self._session.uplink.close(CLOSE_SECONDS)

    def _halt(self, reason: str) -> None:
        logger.error(
            "fp8watch: step %d: the run is halted (exit code 78; to start it again: fp8watch runs release %s): %s",
            self.global_step, self.run, reason,
        )  # fmt: skip
        self._guard.call("halt", self._session.mark_halted, reason)
        self.detach("halted")
        self._ended = Halted(reason)
        raise self._ended

    def _stop(self, reason: str) -> None:
        logger.error(
            "fp8watch: step %d: this rank stops before its next step (exit code 85; restart all ranks): %s",
            self.global_step,
            reason,
        )
        self.detach("ranks apart")
        self._ended = RanksApart(reason)
        raise self._ended
