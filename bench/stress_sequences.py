"""What happens in one sequence of `agreement_stress.py`: orders, faults and arrivals, drawn from a seed."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "agreement"))

from fake_controller import Cut, Order

from fp8watch.records import Command

STEPS, EVERY, NEVER = 24, 5, 10**6
ORDERS: list[tuple[str, dict[str, Any]]] = [
    ("hold_lr", {"factor": 0.5}), ("rewarm", {"steps": 5, "start_factor": 0.1}), ("tighten_clip", {"max_norm": 0.05}),
    ("bf16_layers", {"layers": ["module.0"]}), ("bf16_all", {}), ("raise_margin", {"bits": 1}), ("repair_scale", {}),
    ("skip_update", {"max_consecutive": 2}), ("checkpoint_now", {}), ("checkpoint_cadence", {"every": 3}),
    ("rollback", {"onset_step": 9}), ("rollback", {"onset_step": 13, "skip_batches": 2}),
    ("rollback", {"onset_step": 14, "changes": [{"action": "hold_lr", "params": {"factor": 0.5}}]}),
]  # fmt: skip
REVERTIBLE = {"hold_lr", "tighten_clip", "bf16_layers", "bf16_all", "raise_margin", "checkpoint_cadence"}
FAULTS = ("none", "slow", "fails", "unable", "damaged", "missing", "full", "cut", "disarmed")
AGAIN = 0
"""Replaces a command's sequence number when the answer was given before and is repeated."""
PROMPT_STEPS = 2
"""Most boundaries that an unhindered command takes to reach a rank."""


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """The same for the parent, which gives the orders, and the ranks, which have the faults."""

    name: str
    orders: list[Order]
    faults: dict[int, str]
    cuts: list[Cut] = field(default_factory=list)
    delays: dict[tuple[int, int], int] = field(default_factory=dict)
    """(index in `orders`, rank) -> boundaries from the frame that the order answers to the one where it is taken."""
    outages: dict[int, int] = field(default_factory=dict)
    """Rank -> boundaries after a cut at which nothing reaches it."""
    is_by_clock: bool = False
    """Commands are taken when they arrive, not according to `delays` and `outages`."""


def draw(name: str, ranks: int) -> Sequence:
    """`name`: `sSEED-NUMBER`, or `cSEED-NUMBER` for one in which commands arrive by the clock."""
    is_by_clock = name.startswith("c")
    chance = random.Random(name if is_by_clock else name[1:])
    orders: list[Order] = []
    step = chance.randint(3, 7)
    for index in range(1, chance.randint(2, 5) + 1):
        action, params = chance.choice(ORDERS)
        verb = "apply"
        id_ = f"{name}.{index}"
        earlier = [order.command for order in orders if order.command.action in REVERTIBLE]
        if earlier and chance.random() < 0.3:
            undone = chance.choice(earlier)
            verb, id_, action, params = "revert", undone.id, undone.action, {}
        late = {
            rank: chance.choice([step + 2, step + 5, NEVER]) for rank in range(ranks) if chance.random() < 0.15
        }  # fmt: skip
        command = Command(
            id=id_, run=name, attempt=0, term=1, sequence=index, verb=verb,  # type: ignore[arg-type]
            action=action, params=params, last_step=step + chance.choice([8, 50]), because={"onset_step": 1},
        )  # fmt: skip
        orders.append(Order(command=command, after=step, late=late, is_up_to_date=chance.random() < 0.9))
        if chance.random() < 0.1:
            orders.append(orders[-1])  # sent twice
        step += chance.randint(2, 5)
    faults = {rank: chance.choice(FAULTS) for rank in range(ranks) if chance.random() < 0.4}
    cuts = [Cut(rank=rank, at=chance.randint(4, 15)) for rank, fault in faults.items() if fault == "cut"]
    when = random.Random(f"{name} arrivals")
    delays = {
        (number, rank): when.choices(range(PROMPT_STEPS + 1), [1, 7, 2])[0]
        for number in range(len(orders))
        for rank in range(ranks)
    }
    outages = {cut.rank: when.randint(1, 6) for cut in cuts}
    return Sequence(
        name=name, orders=orders, faults=faults, cuts=cuts, delays=delays, outages=outages, is_by_clock=is_by_clock
    )  # fmt: skip
