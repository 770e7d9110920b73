"""Numbers of torchao layers that `torch.compile` runs: noted by the graph itself.

A compiled graph calls no Python, so nothing can be tapped. What is traced instead is the layer's forward with
three small additions: the amax of input and weight, and that of the output's gradient, raised into 0-d tensors
which the layer holds as plain attributes. Dynamo lifts them to graph inputs, so a graph shared by many equal
blocks writes to each layer's own. torchao computes the same `max(abs(x))` in the same graph, where the compiler
can merge the two. No graph break is added (proven by a test); the graph is larger by these operations.

Only layers that have notes when they are first traced are seen: attach before the first compiled step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

ATTRIBUTE = "_fp8watch_notes"
"""On a layer: `[input, weight, grad_output, precision]`, each 0-d float32 on the layer's device.

`precision`: what the last forward ran in, 1 high precision, 0 FP8; it stays from step to step."""
NOT_RUN = -1.0
"""Value of a note that no graph has written in this step (an amax is never negative)."""
ROLES = ("input", "weight", "grad_output")
PRECISION = len(ROLES)


@torch._dynamo.allow_in_graph
class _NoteGradient(torch.autograd.Function):
    """Identity whose backward raises a note to the gradient's amax; traced by AOTAutograd."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, note: torch.Tensor) -> torch.Tensor:
        ctx.note = note
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:
        _raise_to(ctx.note, grad_output)
        return grad_output, None


def _raise_to(note: torch.Tensor, values: torch.Tensor) -> None:
    # The expression torchao uses, so that both become one; NaN is kept by both.
    note.copy_(torch.maximum(note, torch.max(torch.abs(values.detach())).float()))


def noted_forward(original: Callable[..., Any], module: Any, input: torch.Tensor, high_precision: bool = False) -> Any:
    """`original(module, input)` as Dynamo is to trace it. Layers without notes, evaluation and DTensors: unchanged."""
    notes = getattr(module, ATTRIBUTE, None)
    if notes is None or not torch.is_grad_enabled() or type(input) is not torch.Tensor:
        return original(module, input)
    if notes[0].device != input.device:  # moved after attach
        return original(module, input)
    weight = module.weight
    with torch.no_grad():
        _raise_to(notes[0], input)
        if type(weight) is torch.nn.Parameter:
            _raise_to(notes[1], weight)
        notes[PRECISION].fill_(1.0 if high_precision else 0.0)
    output = original(module, input)
    if not output.requires_grad:
        return output
    return _NoteGradient.apply(output, notes[2])  # type: ignore[no-untyped-call]


def noted_precision(module: torch.nn.Module) -> bool | None:
    """Whether the last compiled forward ran in high precision; None: unknown. One device read: for read-backs."""
    notes = getattr(module, ATTRIBUTE, None)
    value = NOT_RUN if notes is None else float(notes[PRECISION])
    return None if value == NOT_RUN else value == 1.0


def forget_precision(module: torch.nn.Module) -> None:
    """The precision was switched: what ran before says nothing any more."""
    notes = getattr(module, ATTRIBUTE, None)
    if notes is not None:
        notes[PRECISION].fill_(NOT_RUN)


_watched: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Layers whose notes were put on by us: a deep copy or a loaded pickle brings notes along that nobody reads."""


class CompiledNotes:
    """The notes of one source's layers: put on them, cleared a step, gathered, taken off."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._held: dict[int, tuple[torch.nn.Module, list[torch.Tensor]]] = {}
        """Position among `modules` -> the layer and its notes."""
        self._num = len(modules)
        for i, module in enumerate(modules):
            device = next(module.parameters()).device
            # A layer that has notes already is watched by somebody else, unless it is a copy of one that is.
            is_watched = module in _watched and getattr(module, ATTRIBUTE, None) is not None
            if not is_watched and device.type != "meta":
                notes = [torch.full((), NOT_RUN, device=device) for _ in range(len(ROLES) + 1)]
                for note in notes:
                    # As for parameters: CUDA graphs refuse a graph that writes to an input which may move.
                    torch._dynamo.mark_static_address(note, guard=False)
                setattr(module, ATTRIBUTE, notes)
                _watched.add(module)
                self._held[i] = (module, notes)
        self._amax = [note for _, notes in self._held.values() for note in notes[:PRECISION]]

    def clear(self) -> None:
        """A new optimizer step: two launches for all."""
        if self._amax:
            torch._foreach_zero_(self._amax)
            torch._foreach_add_(self._amax, NOT_RUN)

    def gather(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """amax and precision, each [3 * num_modules] float32, `NOT_RUN` where unknown; None without any note."""
        if not self._amax:
            return None
        missing = [torch.full_like(self._amax[0], NOT_RUN)] * (len(ROLES) + 1)
        rows = [self._held[i][1] if i in self._held else missing for i in range(self._num)]
        device = missing[0].device
        ordered = [note for row in rows for note in row[:PRECISION]]
        ordered += [row[PRECISION] for row in rows for _ in ROLES]
        stacked = torch.stack([note if note.device == device else note.to(device) for note in ordered])
        amax, precision = stacked.view(2, -1)
        return amax, precision

    def remove(self) -> None:
        """Take the notes off; graphs traced with them are traced again without."""
        for module, notes in self._held.values():
            if getattr(module, ATTRIBUTE, None) is notes:
                delattr(module, ATTRIBUTE)
                _watched.discard(module)
        self._held.clear()
        self._amax.clear()
