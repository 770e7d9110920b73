"""Source for delayed scaling in Transformer Engine: every amax and scale of every step, from TE's own reduction.

Works with several recipes in one model (one vector per recipe and direction), gradient accumulation (our maximum over
all micro-batches), recompute, CUDA graphs, FP8 primary weights, operations of `te.ops`, history length 1 (where TE's
stored history is always zero) and several models in one process: columns are matched by the identity of a module's
scale tensor, never by position.

Cost: one concatenation per update, of the scales that it is about to replace, which are those that the casts used. TE
makes new amax vectors for each update, so they need no copy. Both go to the ring without further kernels. No pass over
data, no synchronisation.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

from fp8watch.capture.blocks import block_of
from fp8watch.capture.source import Pieces, Places, Reading
from fp8watch.capture.te.states import delayed_states, element_names, metas, recipe_of
from fp8watch.capture.te.tap import UpdateTap, update_tap
from fp8watch.capture.te.tensors import format_name
from fp8watch.formats import FORMATS
from fp8watch.records import TensorColumn

logger = logging.getLogger(__name__)

LOOK_AGAIN = 64
"""Updates until another model's vector is looked at again, because ids of deleted objects are reused."""

_Owned = dict[int, tuple[str, Any, str, bool, Any]]


@dataclass(slots=True, eq=False)
class _Vector:
    """The model's columns in one of TE's concatenated vectors, and their values in this step."""

    is_forward: bool
    slots: list[tuple[tuple[str, Any], Any, Any]]
    """`((module name, tensor), module, recipe state)` of each column."""
    positions: list[int]
    """Index of each column in TE's vector, which may hold other models' tensors and slots that mean nothing too."""
    size: int
    """Elements of TE's vector."""
    scales: tuple[torch.Tensor, ...]
    """The scale tensors that the vector was made from; kept, so that their ids are not reused."""
    signature: tuple[int, ...]
    """The ids of `scales`."""
    amax: torch.Tensor | None = None
    """Largest of the step, of all elements of TE's vector; None: not updated in this step."""
    amax_last: torch.Tensor | None = None
    amax_local: torch.Tensor | None = None
    """Like `amax`, for this rank before the reduction over ranks; None: no reduction."""
    scale: torch.Tensor | None = None
    """Used by the last casts of the step."""
    updates: int = 0

    @property
    def states(self) -> set[int]:
        """Ids of our recipe states in it."""
        return {id(state) for _, _, state in self.slots}

    def is_of(self, scales: Sequence[torch.Tensor]) -> bool:
        """Whether these are its scale tensors. By identity, because `==` would compare their values."""
        known = self.scales
        return len(scales) == len(known) and all(map(is_, scales, known))


class TeDelayedSource:
    """See the module's docstring. `extension` replaces `transformer_engine_torch` in tests."""

    name = "transformer_engine.delayed"

    def __init__(self, model: torch.nn.Module, *, extension: Any | None = None) -> None:
        self._model = model
        self._tap: UpdateTap = update_tap(extension)
        self._vectors: dict[tuple[int, ...], _Vector] = {}
        """By signature, in order of discovery."""
        self._ordered: list[_Vector] = []
        """The same, forward ones first. This and the two below are updated when vectors change."""
        self._is_spread = False
        """Whether they are on several devices."""
        self._places: Places | None = None
        """Of our columns in the joined vectors; None: all of them, in this order."""
        self._foreign: dict[tuple[int, ...], int] = {}
        """Vectors of other models by signature, and how often they were seen."""
        self._recipes: list[Any] = []
        self._num_changes = 0
        self._seen_as: tuple[Any, ...] | None = None
        self._columns: list[TensorColumn] = []
        self._missing: list[str] = []
        self._num_reads = 0
        self._is_stale = True
        """Whether columns may have changed since they were computed: after a step or a new vector."""
        self._tap.subscribe(self._on_update)

    def columns(self) -> Sequence[TensorColumn]:
        """Forward tensors first, each vector in TE's own order; known from the first update on.

        The same object as long as nothing has changed, so that steps need not compare columns.
        """
        if self._is_stale:
            self._refresh()
        return self._columns

    def not_observable(self) -> Sequence[str]:
        """FP8 modules that have not taken part in any update so far."""
        if self._is_stale:
            self._refresh()
        return self._missing

    def _arrange(self) -> None:
        self._ordered = sorted(self._vectors.values(), key=lambda vector: not vector.is_forward)
        self._is_spread = len({scale.device for vector in self._ordered for scale in vector.scales}) > 1
        places, start = [], 0
        for vector in self._ordered:
            places += [start + position for position in vector.positions]
            start += vector.size
        self._places = None if places == list(range(start)) else Places(places)

    def _refresh(self) -> None:
        self._is_stale = False
        # Also after the first two reads: modules that have not shown up by then are named.
        state = (
            self._num_changes,
            min(self._num_reads, 2),
            *[(recipe.margin, recipe.amax_compute_algo) for recipe in self._recipes],
        )
        if state == self._seen_as:
            return
        self._seen_as = state
        vectors = self._ordered
        self._columns = [
            _column(slot, recipe_of(module, forward=vector.is_forward), live, forward=vector.is_forward)
            for vector in vectors
            for slot, module, live in vector.slots
        ]
        seen = {id(module) for vector in vectors for _, module, _ in vector.slots}
        self._missing = [
            f"{name}: {reason}"
            for name, module in self._model.named_modules()
            if id(module) not in seen and (reason := _why_unseen(module, self._num_reads)) is not None
        ]

    def begin(self, *, with_statistics: bool) -> None:
        """Start an optimizer step: forget the previous one."""
        for vector in self._vectors.values():
            vector.amax = vector.amax_last = vector.amax_local = vector.scale = None
            vector.updates = 0

    def read(self) -> Reading | None:
        """amax and scale of this step, and amax_last if there was more than one update.

        A tensor whose amax is 0 was idle and counts as not observed.
        """
        self._num_reads += 1
        self._is_stale = True
        vectors = self._ordered
        forward, backward, is_usual = 0, 0, not self._is_spread
        for vector in vectors:
            updates = vector.updates
            if vector.is_forward:
                forward = max(forward, updates)
            else:
                backward = max(backward, updates)
            is_usual = is_usual and updates == 1 and vector.amax_local is None
        if not forward and not backward:
            return None
        parts: dict[str, list[Any]]
        if is_usual:
            parts = {"amax": [vector.amax for vector in vectors], "scale": [vector.scale for vector in vectors]}
        else:
            names = ["amax", "scale"]
            if forward > 1 or backward > 1:
                names.append("amax_last")
            if any(vector.amax_local is not None for vector in vectors):
                names.append("amax_local")
            parts = {name: self._parts(name) for name in names}
        return Reading(
            values=Pieces(parts, self._places), zero_is_unseen=True, updates_forward=forward, updates_backward=backward
        )  # fmt: skip

    def _parts(self, name: str) -> list[torch.Tensor]:
        """One tensor per vector, all on one device; zeros for a vector that was not updated."""
        vectors = self._ordered
        found: list[torch.Tensor] = []
        for vector in vectors:
            values: torch.Tensor | None = getattr(vector, name)
            if values is None and name == "amax_local":
                values = vector.amax  # a recipe without reduction over ranks
            if values is None:
                values = torch.zeros(vector.size, dtype=torch.float32, device=vectors[0].scales[0].device)
            found.append(values)
        if self._is_spread:
            device = vectors[0].scales[0].device
            found = [values.to(device, non_blocking=True) for values in found]
        return found

    def detach(self) -> None:
        """Stop listening."""
        self._tap.unsubscribe(self._on_update)

    def _on_update(self, amax: torch.Tensor, scales: Sequence[torch.Tensor], local: torch.Tensor | None = None) -> None:
        """Called before TE's update: `amax` is reduced over ranks, `scales` are those just used, `local` is the amax
        before the reduction if there was one. Runs on autograd's thread too."""
        vector: _Vector | None
        for vector in self._ordered:
            if vector.is_of(scales):
                break
        else:
            vector = self._meet(scales)
            if vector is None:
                return
        if vector.is_forward and vector.updates and torch._C._current_graph_task_id() != -1:
            # A recomputation inside a backward pass updates once more with the same amax, but by then newer scales
            # have replaced those of its casts.
            return
        used = torch.cat(vector.scales)
        vector.updates += 1
        if local is not None:
            vector.amax_local = local if vector.amax_local is None else torch.maximum(vector.amax_local, local)
        if vector.amax is None or vector.amax_last is None or vector.scale is None:
            vector.amax, vector.amax_last, vector.scale = amax, amax, used
            return
        # A tensor that has not been cast since the last update keeps the numbers of that update.
        was_cast = amax != 0
        vector.amax = torch.maximum(vector.amax, amax)
        vector.amax_last = torch.where(was_cast, amax, vector.amax_last)
        vector.scale = torch.where(was_cast, used, vector.scale)

    def _meet(self, scales: Sequence[torch.Tensor]) -> _Vector | None:
        """A vector that is not known as ours. One of another model is looked at again only now and then."""
        signature = tuple(map(id, scales))
        met = self._foreign.get(signature, 0)
        if met % LOOK_AGAIN:
            self._foreign[signature] = met + 1
            return None
        return self._index(scales, signature)

    def _index(self, scales: Sequence[torch.Tensor], signature: tuple[int, ...]) -> _Vector | None:
        """Find our columns in a new vector; None: it belongs to other models.

        New vectors also come later: modules get their state at their first forward, and models grow.
        """
        owned: _Owned = {id(entry[4].scale): entry for entry in delayed_states(self._model)}
        found: list[tuple[tuple[str, Any], Any, Any]] = []
        positions: list[int] = []
        offset, is_forward, is_ours = 0, True, False
        for tensor in scales:
            if (owner := owned.get(id(tensor))) is not None:
                name, module, key, is_forward, state = owner
                is_ours = True
                for i, slot in enumerate(element_names(module, name, key, state, forward=is_forward)):
                    if slot is not None:
                        found.append((slot, module, state))
                        positions.append(offset + i)
            offset += tensor.numel()
        if not is_ours:
            self._foreign[signature] = self._foreign.get(signature, 0) + 1
            return None
        self._foreign.clear()
        vector = _Vector(
            is_forward=is_forward, slots=found, positions=positions, size=offset, scales=tuple(scales),
            signature=signature,
        )  # fmt: skip
        # A vector that has grown replaces its former self; so does one whose states were made anew.
        live = {id(entry[4]) for entry in owned.values()}
        for known in list(self._vectors.values()):
            if known.states & live <= vector.states:
                del self._vectors[known.signature]
        self._vectors[signature] = vector
        recipes = {id(recipe): recipe for recipe in self._recipes}
        for _, module, _ in found:
            if (recipe := recipe_of(module, forward=is_forward)) is not None:
                recipes[id(recipe)] = recipe
        self._recipes = list(recipes.values())
        self._num_changes += 1
        self._is_stale = True
        self._arrange()
        return vector


def _why_unseen(module: Any, num_reads: int) -> str | None:
    """Why a module's numbers are missing; None if it holds no FP8 state, like attention outside FP8."""
    held = list(metas(module))
    if not held or num_reads == 0:
        return None
    if any(getattr(meta.get(key), "amax_history", None) is not None for key, _, meta in held):
        return "has taken part in no scale update yet"
    recipe = held[0][2].get("recipe")
    if getattr(module, "fp8", False):
        return f"{type(recipe).__name__} keeps no scale between steps, which this version does not read"
    if hasattr(module, "_fp8_metas"):
        return f"{type(recipe).__name__} keeps no scale between steps, which is not read in operations of te.ops"
    # A module's first forward sets it (TE 2.20 `pytorch/module/base.py` 916, 1501), in FP8 or not.
    if getattr(module, "activation_dtype", "") is None and any(True for _ in module.parameters(recurse=False)):
        return "has not run yet"
    return None


def _column(slot: tuple[str, Any], recipe: Any, state: Any, *, forward: bool) -> TensorColumn:
    name, tensor = slot
    if (dtype := getattr(state, "dtype", None)) is not None:
        fmt = format_name(dtype)
    else:
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
