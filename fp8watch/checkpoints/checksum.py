"""A cheap sum over the bits of all parameters: whether a restore really reached them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def parameter_checksum(model: torch.nn.Module) -> str:
    """The sum over a model's parameters: hexadecimal, 64 bit."""
    return sum_bits(model.parameters())


def sum_bits(tensors: Iterable[torch.Tensor]) -> str:
    """Bits of each tensor summed as integers, weighted by place: hexadecimal, 64 bit.

    Exact, so the order of summation does not matter. One value is read from the device.
    """
    total: torch.Tensor | None = None
    for place, tensor in enumerate(tensors, start=1):
        data = tensor.detach()
        data = data.to_local() if hasattr(data, "to_local") else data
        if data.numel() == 0:
            continue
        if data.is_complex():
            data = torch.view_as_real(data)
        bits = data.contiguous().view(_INTEGERS[data.element_size()]).flatten()
        # A position weight within the tensor, so that two exchanged elements are noticed.
        weights = torch.arange(bits.numel(), device=bits.device, dtype=torch.int64) % 8191 + 1
        part = (bits.to(torch.int64) * weights).sum() * (2 * place + 1)
        total = part if total is None else total + part.to(total.device)
    return f"{(int(total) if total is not None else 0) & 0xFFFF_FFFF_FFFF_FFFF:016x}"
