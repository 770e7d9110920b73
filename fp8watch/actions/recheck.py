"""`recheck`: the coming batch forward and backward twice; a sound device gives the same bits twice."""

from __future__ import annotations

import copy
from typing import Any

import torch

from fp8watch import rng
from fp8watch.actions.base import Applied, ReadBack
from fp8watch.actions.context import ActionContext
from fp8watch.checkpoints.checksum import sum_bits
from fp8watch.errors import ActionError

NOTHING = sum_bits([])
"""The sum over no gradient at all."""


class Recheck:
    """No optimizer step is made; random state, FP8 state, buffers and gradients are put back.

    Kernels that are not deterministic by themselves differ, too: a difference is evidence, no proof.
    """

    name = "recheck"

    def __init__(self, context: ActionContext) -> None:
        self._context = context

    def unavailable(self) -> str | None:
        """See `Action`."""
        return None if self._context.forward is not None else "needs forward=: the call of the model is not ours"

    def apply(self, step: int, params: dict[str, Any]) -> Applied:
        """See `Action`. `expected["agree"]` is the verdict."""
        if reason := self.unavailable():
            raise ActionError(reason)
        model, controls = self._context.model, self._context.controls
        gradients = {name: p.grad for name, p in model.named_parameters()}
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        fp8 = copy.deepcopy(controls.state_dict()) if controls is not None else None
        random = rng.snapshot()
        sums: list[tuple[str, str]] = []
        try:
            for _ in range(2):
                self._put_back(buffers, fp8, random)
                sums.append(self._run())
        finally:
            self._put_back(buffers, fp8, random)
            for name, parameter in model.named_parameters():
                parameter.grad = gradients[name]
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

    def _put_back(self, buffers: dict[str, torch.Tensor], fp8: dict[str, object] | None, random: rng.State) -> None:
        with torch.no_grad():
            for name, buffer in self._context.model.named_buffers():
                buffer.copy_(buffers[name])
        if fp8 is not None and self._context.controls is not None:
            self._context.controls.load_state_dict(copy.deepcopy(fp8))
        rng.restore(random)

    def read_back(self, applied: Applied) -> ReadBack:
        """It was done in full; the verdict is in `observed`."""
        observed = dict(applied.expected)
        if observed["gradients"][0] == NOTHING:
            return ReadBack(ok=False, observed=observed, detail="no gradient was computed: nothing was compared")
        return ReadBack(ok=True, observed=observed, detail="" if observed["agree"] else "the two runs differ")

    def revert(self, applied: Applied) -> None:
        """It left nothing behind."""
