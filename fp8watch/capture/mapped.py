"""Pinned host memory as a CUDA tensor: kernels write to it directly, so that no copy has to be launched.

Pinned memory has the same address on host and device (CUDA programming guide, unified addressing), and a kernel's
writes are visible to the host once an event recorded after it has completed. A few kilobytes a step cost the device
nothing that could be measured. Confidential computing and some virtual GPUs have no such memory, so it is tried first.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

logger = logging.getLogger(__name__)

_PATTERN = 0x5A


class _PinnedMemory:
    """Describes a host tensor's memory as numba and CuPy describe theirs, and keeps it alive."""

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": tuple(host.shape), "typestr": "|u1", "data": (host.data_ptr(), False), "strides": None,
            "version": 3,
        }  # fmt: skip


def mapped(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CUDA tensor over the same memory as `host` (uint8 [n], pinned). Raises `RuntimeError` if there is none."""
    with torch.cuda.device(device):
        found = torch.as_tensor(_PinnedMemory(host), device=device)
    if found.data_ptr() != host.data_ptr():
        raise RuntimeError("the device sees pinned memory at another address, or a copy of it")
    return found


@functools.lru_cache(maxsize=64)
def can_map(device: torch.device) -> bool:
    """Whether kernels of a CUDA device can write to pinned memory. Tried once a process, which waits for the device."""
    try:
        host = torch.zeros(64, dtype=torch.uint8, device="cpu").pin_memory()
        mapped(host, device).fill_(_PATTERN)
        torch.cuda.synchronize(device)
        return bool((host == _PATTERN).all())
    except Exception as error:
        logger.info("fp8watch: kernels cannot write to pinned memory, so it is copied to: %s", error)
        return False
