"""The learning-rate schedule: linear warm-up, then cosine, as a factor of the scheduler's own position.

It is a function bound with `functools.partial`, with the parameter names that Transformers uses, so that the state of
the scheduler is its position alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

Schedule = Callable[[int], float]
"""Updates done -> factor on the peak LR."""


def warmup_cosine(step: int, *, num_warmup_steps: int, num_training_steps: int, floor: float) -> float:
    """Rises to 1 over the warm-up (never 0), falls to `floor` at the end, and stays there."""
    if step < num_warmup_steps:
        return (step + 1) / (num_warmup_steps + 1)
    progress = min(1.0, (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def schedule(*, warmup_steps: int, steps: int, floor: float) -> Schedule:
    """`warmup_cosine` for a training of this many steps."""
    return partial(warmup_cosine, num_warmup_steps=warmup_steps, num_training_steps=steps, floor=floor)
