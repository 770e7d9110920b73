"""Snapshots of the host's random generators (torch, Python, numpy) as tensors and plain values.

Taking one draws no number. `torch.load(weights_only=True)` accepts its form.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

State = dict[str, Any]


def snapshot() -> State:
    """The state of torch's CPU generator, `random` and `numpy.random`."""
    version, words, cached = random.getstate()
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "words": list(words), "gauss": cached},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        },
    }


def restore(state: State) -> None:
    """Reset the generators to a snapshot, also to one that has been through a checkpoint."""
    torch.set_rng_state(state["torch"])
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["gauss"]))
