"""rank_mismatch: ranks that held the same values no longer do.

Data-parallel replicas have bit-identical parameters, and ranks whose amaxes are reduced together have identical scales.
Which ranks belong together depends on how the model is split, and is learnt rather than configured: ranks whose
checksum stayed equal while it changed `LEARN` times form a group, and a rank that leaves its group for `STEPS`
observations in a row is an act symptom. The smaller side of the group is named (of two ranks there is no smaller side,
and no rank is named). Two checksums are compared: `scale_checksum`, of all scales of a step, and `param_checksum`, of a
sample of the parameters.
Ranks declared to hold parts of the same tensors (`mesh=` of attach) are compared from the first step on. Unequal scales
under delayed scaling are then a warning, because amaxes are reduced over another group than the one that shares
tensors; modules that ran in FP8 on one rank and in BF16 on another are an act symptom.
Source: detector default D12, precursor P20 (Megatron-LM pull request 442: amax reduced over the wrong group, every
FP8 run of a 40 B model diverged after about 1,000 steps).
Cannot see: ranks that never agreed and were not declared; differences outside the sample of the parameters.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import msgspec

from fp8watch.detect.base import Sample, Symptom

LEARN = 8
"""Changes of the value that ranks must have made together to form a group."""
PRECISION, SCALES = "precision_checksum", "scale_checksum"
STEPS = 2
"""Observations in a row in which a rank must differ."""


class Quantity(msgspec.Struct):
    """The state of one checksum."""

    values: dict[int, float] = {}
    """Rank -> newest value."""
    group: dict[int, int] = {}
    """Rank -> the lowest rank it has agreed with."""
    together: dict[int, int] = {}
    """Rank -> changes it made in agreement with `group`."""
    apart: dict[int, int] = {}
    """Rank -> observations in a row in which it differed from its group."""
    onset: dict[int, int] = {}


class Disagreement(msgspec.Struct):
    """A group of ranks that were declared to share tensors, and differ."""

    of: str
    ranks: list[int]
    onset: int
    count: int = 1
    """Observations in a row."""


class RankMismatchState(msgspec.Struct):
    """Name of the checksum -> its state."""

    quantities: dict[str, Quantity] = {}
    declared: list[Disagreement] = []


class RankMismatch:
    """Checksums of ranks against each other."""

    name = "rank_mismatch"

    def start(self) -> RankMismatchState:
        """The state before any sample."""
        return RankMismatchState()

    def rolled_back(self, state: RankMismatchState, step: int) -> RankMismatchState:
        """Groups persist: all ranks were restored from the same checkpoint."""
        for quantity in state.quantities.values():
            quantity.values, quantity.apart, quantity.onset = {}, {}, {}
        state.declared = []
        return state

    def update(self, state: RankMismatchState, sample: Sample) -> tuple[RankMismatchState, list[Symptom]]:
        """Look at one step of several ranks; steps of a single rank are ignored."""
        if len(sample.rank_values) == 0:
            return state, []
        symptoms: list[Symptom] = []
        for name, values in sample.rank_values.items():
            if len(values) < 2 or name == PRECISION:
                continue
            quantity = state.quantities.setdefault(name, Quantity())
            apart = _look(quantity, values, sample.step)
            if apart:
                symptoms.append(_symptom(self.name, name, quantity, values, apart, sample))
        state.declared = _look_at_declared(state.declared, sample)
        symptoms += [_declared(self.name, item, sample) for item in state.declared if item.count >= STEPS]
        return state, symptoms[:1]


def _look_at_declared(known: list[Disagreement], sample: Sample) -> list[Disagreement]:
    """Declared groups whose ranks differ in this step; a group that was not observed keeps its state."""
    if not sample.tensor_groups:
        return []
    before = {(item.of, tuple(item.ranks)): item for item in known}
    found = []
    # Without a history, scales belong to each rank's own slice and may rightly differ.
    is_delayed = all(column.recipe == "delayed" for column in sample.tensors)
    for of in (PRECISION, SCALES) if is_delayed else (PRECISION,):
        seen = sample.rank_values.get(of, {})
        for group in sample.tensor_groups:
            values = {seen[rank] for rank in group if rank in seen}
            item = before.get((of, group))
            if len(values) > 1:
                count, onset = (1, sample.step) if item is None else (item.count + 1, item.onset)
                found.append(Disagreement(of=of, ranks=list(group), onset=onset, count=count))
            elif not values and item is not None:
                found.append(item)
    return found


def _declared(detector: str, item: Disagreement, sample: Sample) -> Symptom:
    evidence: dict[str, Any] = {
        "of": item.of,
        "ranks": item.ranks,
        "group_size": len(item.ranks),
        "is_one_rank": False,
        "is_declared": True,
        "first_bad_step": item.onset,
    }
    return Symptom(
        detector=detector,
        severity="act" if item.of == PRECISION else "warn",
        step=sample.step,
        onset_step=item.onset,
        evidence=evidence,
    )


def _look(quantity: Quantity, values: dict[int, float], step: int) -> list[int]:
    """The ranks that left their group long enough ago."""
    lowest: dict[float, int] = {}
    for rank in sorted(values):
        lowest.setdefault(values[rank], rank)
    members: dict[int, list[int]] = defaultdict(list)
    for rank, first in quantity.group.items():
        if quantity.together[rank] >= LEARN and rank in values:
            members[first].append(rank)
    odd: set[int] = set()
    for ranks in members.values():
        counts = Counter(values[rank] for rank in ranks)
        if len(counts) > 1:
            usual, most = counts.most_common(1)[0]
            is_tied = sum(count == most for count in counts.values()) > 1
            odd |= set(ranks) if is_tied else {rank for rank in ranks if values[rank] != usual}
    for rank, value in values.items():
        has_changed = quantity.values.get(rank) != value
        if rank in odd:
            quantity.apart[rank] = quantity.apart.get(rank, 0) + 1
            quantity.onset.setdefault(rank, step)
            continue
        quantity.apart.pop(rank, None)
        quantity.onset.pop(rank, None)
        if quantity.together.get(rank, 0) >= LEARN:
            continue
        if quantity.group.get(rank) != lowest[value]:
            quantity.group[rank], quantity.together[rank] = lowest[value], 0
        elif has_changed:
            quantity.together[rank] += 1
    quantity.values = dict(values)
    return sorted(rank for rank, count in quantity.apart.items() if count >= STEPS)


def _symptom(
    detector: str, name: str, quantity: Quantity, values: dict[int, float], apart: list[int], sample: Sample
) -> Symptom:
    group = [rank for rank in values if quantity.group.get(rank) == quantity.group[apart[0]]]
    evidence: dict[str, Any] = {
        "of": name,
        "ranks": apart,
        "group_size": len(group),
        "is_one_rank": len(apart) == 1,
        "first_bad_step": min(quantity.onset[rank] for rank in apart),
    }
    return Symptom(
        detector=detector,
        severity="act",
        step=sample.step,
        onset_step=int(evidence["first_bad_step"]),
        rank=apart[0] if len(apart) == 1 else None,
        evidence=evidence,
    )
