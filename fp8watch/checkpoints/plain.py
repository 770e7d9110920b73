"""Converts state to tensors and plain values, so that `torch.load(weights_only=True)` can read it.

Anything else is refused by name at the save, and not discovered at the rollback that needs it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fp8watch.checkpoints.sharding import is_sharded, to_shard
from fp8watch.errors import CheckpointError


def to_plain(value: Any, name: str) -> Any:
    """A copy of the containers with NumPy values converted to tensors and Python numbers. Tensors are shared.

    Raises `CheckpointError` naming the first value that cannot be stored, e.g. `scheduler.lr_lambdas[0].model`.
    """
    if value is None or type(value) in (bool, int, float, str, bytes, torch.Size, torch.dtype, torch.device):
        return value
    if is_sharded(value):
        return to_shard(value)
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is Counter:
        return Counter({to_plain(key, name): to_plain(count, name) for key, count in value.items()})
    if isinstance(value, Mapping) and type(value).__name__ in ("dict", "OrderedDict", "defaultdict", "mappingproxy"):
        pairs = ((to_plain(key, name), to_plain(item, f"{name}.{key}")) for key, item in value.items())
        if not isinstance(value, OrderedDict):
            return dict(pairs)
        plain = OrderedDict(pairs)
        if hasattr(value, "_metadata"):
            # Module versions, which `load_state_dict` needs for migrations.
            plain._metadata = to_plain(value._metadata, f"{name}._metadata")  # type: ignore[attr-defined]
        return plain
    if type(value) in (list, tuple, set):
        items = [to_plain(item, f"{name}[{index}]") for index, item in enumerate(value)]
        return type(value)(items)
    raise CheckpointError(f"{name}: {type(value).__name__} cannot be stored; only tensors and plain values can")
