"""Transformer Engine, delayed scaling: every amax and every scale of every step through TE's own reduction.

Works with gradient accumulation (our maximum over all micro-batches), recompute, CUDA graphs, FP8 primary
weights, history length 1 (where TE's stored history is always zero) and several models in one process:
columns are matched by the identity of a module's scale tensor, never by position.

Cost: for each direction and micro-batch one concatenation of the scales and two or three elementwise kernels
over the vector; no pass over data, no synchronisation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8watch.capture.blocks import block_of
from fp8watch.capture.source import Reading
from fp8watch.capture.te_slots import slot_names
from fp8watch.capture.te_tap import UpdateTap, update_tap
from fp8watch.formats import FORMATS
from fp8watch.records import TensorColumn

logger = logging.getLogger(__name__)

DIRECTIONS = (("scaling_fwd", True), ("scaling_bwd", False))


@dataclass(slots=True)
class _Direction:
    """Where the model's columns lie in one of TE's concatenated vectors, and what was seen there this step."""

    slots: list[tuple[tuple[str, Any], Any, Any]]
    """`((module name, tensor), module, recipe state)` of each column."""
    positions: torch.Tensor | None
    """Index into TE's vector (int64, on the device); None: the vector is ours alone, in this order."""
    signature: tuple[int, ...]
    """Identities of the scale tensors the index was made for."""
    amax: torch.Tensor
    amax_last: torch.Tensor
    scale: torch.Tensor
    updates: int = 0


def delayed_states(model: torch.nn.Module) -> Iterator[tuple[str, Any, str, bool, Any]]:
    """`(name, module, key, is_forward, recipe state)` of every delayed-scaling state in the model."""
    for name, module in model.named_modules():
        meta = getattr(module, "fp8_meta", None)
        if not isinstance(meta, dict):
            continue
        for key, forward in DIRECTIONS:
            state = meta.get(key)
            if getattr(state, "amax_history", None) is not None and getattr(state, "scale", None) is not None:
                yield name, module, key, forward, state


class TeDelayedSource:
    """See the module's docstring. `extension` stands in for `transformer_engine_torch` in tests."""

    name = "transformer_engine.delayed"

    def __init__(self, model: torch.nn.Module, *, extension: Any | None = None) -> None:
        self._model = model
        self._tap: UpdateTap = update_tap(extension)
        self._directions: dict[bool, _Direction] = {}
        self._owned: dict[int, tuple[str, torch.nn.Module, bool, Any]] = {}
        self._recipes: list[Any] = []
        self._seen_as: tuple[Any, ...] | None = None
        self._columns: list[TensorColumn] = []
        self._missing: list[str] = []
        self._num_reads = 0
        self._tap.subscribe(self._on_update)

    def columns(self) -> Sequence[TensorColumn]:
        """Forward tensors first, each direction in TE's own order; known from the first update on.

        The same object as long as nothing has changed, so that a step does not pay for comparing them.
        """
        self._refresh()
        return self._columns

    def not_observable(self) -> Sequence[str]:
        """FP8 modules that took part in no update so far."""
        self._refresh()
        return self._missing

    def _refresh(self) -> None:
        # Twice more after the first step: what has still not shown up by then is named.
        state = (
            min(self._num_reads, 2),
            *((forward, part.signature) for forward, part in self._directions.items()),
            *((recipe.margin, recipe.amax_compute_algo) for recipe in self._recipes),
        )
        if state == self._seen_as:
            return
        self._seen_as = state
        self._columns = [
            _column(slot, forward, module.fp8_meta.get("recipe"), live)
            for forward in (True, False)
            if forward in self._directions
            for slot, module, live in self._directions[forward].slots
        ]
        seen = {id(module) for part in self._directions.values() for _, module, _ in part.slots}
        self._missing = [
            f"{name}: {reason}"
            for name, module in self._model.named_modules()
            if id(module) not in seen and (reason := _why_unseen(module, self._num_reads)) is not None
        ]

    def begin(self, *, with_statistics: bool) -> None:
        """Forget the step that was read."""
        for direction in self._directions.values():
            direction.amax.zero_()
            direction.updates = 0

    def read(self) -> Reading | None:
        """amax, amax_last and scale of this step; a tensor whose amax is 0 was idle and counts as not observed."""
        self._num_reads += 1
        parts = [self._directions[forward] for forward in (True, False) if forward in self._directions]
        if not any(part.updates for part in parts):
            return None
        amax = torch.cat([part.amax for part in parts])
        seen = amax != 0
        return Reading(
            values={
                "amax": amax,
                "amax_last": torch.cat([part.amax_last for part in parts]),
                "scale": torch.cat([part.scale for part in parts]),
            },
            valid={"amax": seen, "amax_last": seen, "scale": seen},
            updates_forward=self._directions[True].updates if True in self._directions else 0,
            updates_backward=self._directions[False].updates if False in self._directions else 0,
        )

    def detach(self) -> None:
        """Leave the tap."""
        self._tap.unsubscribe(self._on_update)

    def _on_update(self, amax: torch.Tensor, scales: Sequence[torch.Tensor]) -> None:
        """TE is about to update: `amax` is reduced, `scales` are those just used. Runs on autograd's thread too."""
        signature = tuple(map(id, scales))
        forward = self._direction_of(signature)
        if forward is None:
            return
        direction = self._directions.get(forward)
        if direction is None or direction.signature != signature:
            direction = self._index(forward, scales, signature, amax.device)
        mine = amax if direction.positions is None else amax[direction.positions]
        used = torch.cat(tuple(scales))
        torch.maximum(direction.amax, mine, out=direction.amax)
        direction.amax_last.copy_(mine)
        direction.scale.copy_(used if direction.positions is None else used[direction.positions])
        direction.updates += 1

    def _direction_of(self, signature: tuple[int, ...]) -> bool | None:
        """Whether these scale tensors are our forward or backward ones; None: they belong to other models."""
        for forward, direction in self._directions.items():
            if direction.signature == signature:
                return forward
        # Modules get their state at their first forward, and models grow: look again at an unknown vector.
        self._owned = {
            id(state.scale): (name, module, forward, state)
            for name, module, _, forward, state in delayed_states(self._model)
        }
        return next((self._owned[i][2] for i in signature if i in self._owned), None)

    def _index(
        self, forward: bool, scales: Sequence[torch.Tensor], signature: tuple[int, ...], device: torch.device
    ) -> _Direction:
        found: list[tuple[tuple[str, Any], Any, Any]] = []
        positions: list[int] = []
        offset = 0
        for tensor in scales:
            owner = self._owned.get(id(tensor))
            if owner is not None:
                name, module, _, state = owner
                for i, slot in enumerate(slot_names(module, name, forward=forward, num_slots=tensor.numel())):
                    if slot is not None:
                        found.append((slot, module, state))
                        positions.append(offset + i)
            offset += tensor.numel()
        recipes = {
            id(recipe): recipe for _, module, _ in found if (recipe := module.fp8_meta.get("recipe")) is not None
        }
        self._recipes = list({**{id(r): r for r in self._recipes}, **recipes}.values())
        index = None
        if positions != list(range(offset)):
            index = torch.tensor(positions, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        direction = _Direction(
            slots=found,
            positions=index,
            signature=signature,
            amax=torch.zeros(len(found), device=device),
            amax_last=torch.zeros(len(found), device=device),
            scale=torch.ones(len(found), device=device),
        )
        self._directions[forward] = direction
        return direction


def _why_unseen(module: Any, num_reads: int) -> str | None:
    """Why a module's numbers are missing; None for one that holds no FP8 state, like attention outside FP8."""
    meta = getattr(module, "fp8_meta", None)
    if not isinstance(meta, dict) or num_reads == 0:
        return None
    if any(getattr(meta.get(key), "amax_history", None) is not None for key, _ in DIRECTIONS):
        return "has taken part in no scale update yet"
    if getattr(module, "fp8", False):
        return f"{type(meta.get('recipe')).__name__} keeps no scale between steps, which this version does not read"
    return None


def _column(slot: tuple[str, Any], forward: bool, recipe: Any, state: Any) -> TensorColumn:
    name, tensor = slot
    hybrid = "HYBRID" in str(getattr(recipe, "fp8_format", "HYBRID"))
    fmt = "e4m3" if forward or not hybrid else "e5m2"
    assert fmt in FORMATS
    recent = getattr(recipe, "amax_compute_algo", "max") == "most_recent"
    return TensorColumn(
        module=name,
        tensor=tensor,
        block=block_of(name),
        fp8_format=fmt,
        recipe="delayed",
        history_len=int(state.amax_history.shape[0]),
        amax_compute_algo="most_recent" if recent else "max",
        margin=float(getattr(recipe, "margin", 0)),
        source="tapped",
    )
