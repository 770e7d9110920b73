"""Values that only the training loop knows, given by `watch.record(name=...)` for the whole run or per module.

`watch.record(attention_logit_max=12.0)` becomes the scalar `attention_logit_max`; a mapping from modules becomes one
scalar per module, `attention_logit_max:blocks.3.attention`.
"""

from __future__ import annotations

from fp8watch.detect.base import Sample


def given(sample: Sample, name: str) -> dict[str, float]:
    """Scalar name -> value, for the run (if given) and for every module."""
    scalars = sample.scalars
    start = name + ":"
    found = {key: value for key, value in scalars.items() if key.startswith(start)}
    if name in scalars:
        found[name] = scalars[name]
    return found


def module_of(scalar: str) -> str:
    """The module that a scalar's name refers to; empty for the run's own."""
    return scalar.partition(":")[2]
