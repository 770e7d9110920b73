"""What only the training loop can know: values given by `watch.record(name=...)`, for the whole run or by module.

`watch.record(attention_logit_max=12.0)` becomes the scalar `attention_logit_max`; a mapping from modules gives one
scalar a module, `attention_logit_max:blocks.3.attention`.
"""

from __future__ import annotations

from fp8watch.detect.base import Sample


def given(sample: Sample, name: str) -> dict[str, float]:
    """Scalar name -> value, for the run's own (if given) and every module's."""
    scalars = sample.scalars
    start = name + ":"
    found = {key: value for key, value in scalars.items() if key.startswith(start)}
    if name in scalars:
        found[name] = scalars[name]
    return found


def module_of(scalar: str) -> str:
    """The module a scalar's name speaks of, or nothing."""
    return scalar.partition(":")[2]
