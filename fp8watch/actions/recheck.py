"""`recheck`: run the next batch forward and backward twice. A healthy device gives the same bits both times."""

from __future__ import annotations

import copy
from typing import Any

import torch

from fp8watch import rng
from fp8watch.actions.base import Applied, ReadBack
from fp8watch.actions.context import ActionContext
from fp8watch.actions.undo import Undo, all_or_nothing
from fp8watch.checkpoints.checksum import sum_bits
from fp8watch.checkpoints.sharding import is_sharded
from fp8watch.errors import ActionError, PartlyChanged

NOTHING = sum_bits([])
"""The checksum of no gradients at all."""


class Recheck:
    """Makes no optimizer step, and restores random state, FP8 state, buffers and gradients.

    Non-deterministic kernels differ too, so a difference is evidence, not proof.
    """

    name = "recheck"

    def __init__(self, context: ActionContext) -> None:
        self._context = context

    def unavailable(self) -> str | None:
        """See `Action`."""
        return None if self._context.forward is not None else "needs forward=: fp8watch cannot call the model itself"

    @all_or_nothing
    def apply(self, step: int, params: dict[str, Any], undo: Undo) -> Applied:
        """See `Action`. `expected["agree"]` is the verdict."""
        if reason := self.unavailable():
            raise ActionError(reason)
        model, controls = self._context.model, self._context.controls
        gradients = {name: (p.grad, _copy_if_shared(p.grad)) for name, p in model.named_parameters()}
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        fp8 = copy.deepcopy(controls.state_dict()) if controls is not None else None
        random = rng.snapshot()
        sums: list[tuple[str, str]] = []
        restores = {
            "random generators": lambda: rng.restore(random),
            "FP8 state": lambda: None if fp8 is None else self._restore_fp8(fp8),
            "buffers": lambda: self._restore_buffers(buffers),
        }
        for what, restore in restores.items():
            undo.add(what, restore)
        undo.add("gradients", lambda: self._restore_gradients(gradients))
        try:
            for _ in range(2):
                for restore in reversed(restores.values()):
                    restore()
                sums.append(self._run())
        except Exception as error:  # from the user's `forward`, or out of memory
            raise ActionError(f"the batch could not be run again: {type(error).__name__}: {error}") from error
        if left := undo.run():
            raise PartlyChanged(left)
        return Applied(
            step=step,
            params=params,
            expected={
                "agree": sums[0] == sums[1],
                "loss": [first for first, _ in sums],
                "gradients": [second for _, second in sums],
            },
        )

    def _run(self) -> tuple[str, str]:
        assert self._context.forward is not None
        model = self._context.model
        for parameter in model.parameters():
            parameter.grad = None
        with torch.enable_grad():
            loss = self._context.forward()
            torch.autograd.backward(loss)
        return sum_bits([loss]), sum_bits(p.grad for p in model.parameters() if p.grad is not None)

    def _restore_buffers(self, saved: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self._context.model.named_buffers():
                if name in saved:  # else the forward has just made it
                    buffer.copy_(saved[name])

    def _restore_fp8(self, saved: dict[str, object]) -> None:
        assert self._context.controls is not None
        self._context.controls.load_state_dict(copy.deepcopy(saved))

    def _restore_gradients(self, saved: dict[str, tuple[torch.Tensor | None, torch.Tensor | None]]) -> None:
        for name, parameter in self._context.model.named_parameters():
            parameter.grad, values = saved[name]
            if parameter.grad is not None and values is not None:
                parameter.grad.copy_(values)

    def read_back(self, applied: Applied) -> ReadBack:
        """Whether anything was compared; the verdict is in `observed["agree"]`."""
        observed = dict(applied.expected)
        if observed["gradients"][0] == NOTHING:
            return ReadBack(ok=False, observed=observed, detail="no gradient was computed: nothing was compared")
        return ReadBack(ok=True, observed=observed, detail="" if observed["agree"] else "the two runs differ")

    def revert(self, applied: Applied) -> None:
        """Nothing to undo."""

    def read_back_revert(self, applied: Applied) -> ReadBack:
        """Always ok."""
        return ReadBack(ok=True)


def _copy_if_shared(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A copy of a gradient that is a view of a larger buffer, as DistributedDataParallel with `gradient_as_bucket_view`
    makes them: the next backward pass overwrites it. None: it is not a view.
    """
    if gradient is None or is_sharded(gradient) or gradient.layout is not torch.strided:
        return None
    is_shared = gradient._is_view() or gradient.untyped_storage().nbytes() > gradient.nbytes
    return gradient.clone() if is_shared else None
