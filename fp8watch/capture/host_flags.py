"""Flags on the device that the host may learn late: copied without waiting, read when they have arrived."""

from __future__ import annotations

from typing import Any

import torch


class HostFlags:
    """One copy in flight at a time; flags offered meanwhile are dropped (such flags are offered again later)."""

    def __init__(self) -> None:
        self._host: torch.Tensor | None = None
        self._event: Any = None

    def offer(self, flags: torch.Tensor) -> None:
        """Start copying flags: bool [n] or [rows, n], on any device."""
        if self._host is not None:
            return
        if flags.device.type != "cuda":
            self._host = flags.cpu()
            return
        self._host = torch.empty(flags.shape, dtype=flags.dtype, device="cpu", pin_memory=True)
        self._host.copy_(flags, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def take(self) -> list[Any] | None:
        """The flags that have arrived, once, as (nested) lists of bool; None: none yet."""
        if self._host is None or (self._event is not None and not self._event.query()):
            return None
        flags: list[Any] = self._host.tolist()
        self._host = self._event = None
        return flags
