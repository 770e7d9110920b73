"""Numbers of torchao layers under `torch.compile`: the compiled graph itself notes them.

A compiled graph calls no Python, so nothing can be tapped. Instead the layer's forward is traced with three small
additions: the amax of input, weight and the output's gradient, accumulated (maximum) in 0-D tensors that the layer
holds as plain attributes ("notes"). Dynamo lifts them to graph inputs, so a graph shared by many equal blocks writes
to each layer's own. torchao computes the same `max(abs(x))` in the same graph, so the compiler can merge the two. No
graph break is added (proven by a test); the graph is larger by these operations.

Only layers that have notes when they are first traced are observed: attach before the first compiled step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

ATTRIBUTE = "_fp8watch_notes"
"""Attribute of a layer: `[input, weight, grad_output, precision]`, each 0-D float32 on the layer's device.

`precision` of the last forward: 1 high precision, 0 FP8; it is kept from step to step."""
NOT_RUN = -1.0
"""Value of a note that no graph wrote in this step (an amax is never negative)."""
ROLES = ("input", "weight", "grad_output")
PRECISION = len(ROLES)


@torch._dynamo.allow_in_graph
class _NoteGradient(torch.autograd.Function):
    """Identity whose backward raises a note to the gradient's amax. Traced by AOTAutograd."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, note: torch.Tensor) -> torch.Tensor:
        ctx.note = note
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:
        _raise_to(ctx.note, grad_output)
        return grad_output, None


def _raise_to(note: torch.Tensor, values: torch.Tensor) -> None:
    # The same expression as in torchao, so that the compiler can merge them; both keep NaN.
    note.copy_(torch.maximum(note, torch.max(torch.abs(values.detach())).float()))


def noted_forward(original: Callable[..., Any], module: Any, input: torch.Tensor, high_precision: bool = False) -> Any:
    """`original(module, input)` with notes, for Dynamo to trace; plain without notes, in evaluation, for DTensors."""
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
    """Whether the last compiled forward ran in high precision; None: unknown. Reads the device: for read-backs only."""
    notes = getattr(module, ATTRIBUTE, None)
    value = NOT_RUN if notes is None else float(notes[PRECISION])
    return None if value == NOT_RUN else value == 1.0


def forget_precision(module: torch.nn.Module) -> None:
    """Reset the noted precision after a switch: earlier forwards say nothing about it."""
    notes = getattr(module, ATTRIBUTE, None)
    if notes is not None:
        notes[PRECISION].fill_(NOT_RUN)


_watched: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Layers that we put notes on; a deep copy or a loaded pickle has notes too, but nobody reads them."""


class CompiledNotes:
    """The notes of one source's layers: adds, clears, gathers and removes them."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._held: dict[int, tuple[torch.nn.Module, list[torch.Tensor]]] = {}
        """Position among `modules` -> the layer and its notes."""
        self._num = len(modules)
        for i, module in enumerate(modules):
            device = next(module.parameters()).device
            # A layer that has notes already is watched by another source, unless it is a copy of a watched one.
            is_watched = module in _watched and getattr(module, ATTRIBUTE, None) is not None
            if not is_watched and device.type != "meta":
                notes = [torch.full((), NOT_RUN, dtype=torch.float32, device=device) for _ in range(len(ROLES) + 1)]
                for note in notes:
                    # As for parameters: CUDA graphs refuse a graph that writes to an input whose address may change.
                    torch._dynamo.mark_static_address(note, guard=False)
                setattr(module, ATTRIBUTE, notes)
                _watched.add(module)
                self._held[i] = (module, notes)
        self._amax = [note for _, notes in self._held.values() for note in notes[:PRECISION]]

    def clear(self) -> None:
        """Start an optimizer step: two launches for all notes."""
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
        """Remove the notes. Graphs traced with them are traced again without."""
        for module, notes in self._held.values():
            if getattr(module, ATTRIBUTE, None) is notes:
                delattr(module, ATTRIBUTE)
                _watched.discard(module)
        self._held.clear()
        self._amax.clear()
