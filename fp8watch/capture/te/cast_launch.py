"""Launches the kernel that counts a cast the shortest way: a row's cast that is like the row's last one.

On a launch-bound model nearly all of a logging step's extra time is launching these kernels. With a Triton that
`fp8watch.capture.triton_launch` does not know, casts are launched through Triton.

Importing this does not need Triton.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from fp8watch.capture.te.cast_rows import CastRow

logger = logging.getLogger(__name__)

ALIGNMENT = 16
"""Bytes. Triton compiles another kernel for addresses that are not a multiple of this."""
LARGE = 2**31
"""From this number of elements on, the number takes 64 bits, and another kernel."""


def repeat(row: CastRow, values: torch.Tensor, codes: torch.Tensor, made: Any) -> bool:
    """Count a cast that is like the row's last one, and add its elements. False: it is not, and nothing was added.

    `codes`: the bytes that the cast made, `_data` of its result `made`. This is called for most casts of a logging
    step, so it asks only for what can differ between two casts of one row. TE's kernels have just read and written at
    these addresses, on the current device; they write `_data` as contiguous bytes whatever its strides are, but make a
    contiguous copy of the source first.
    """
    last = row.last
    if last is None:
        return False
    shortcut, dtype, code_then = last
    launch, programs, function, cooperative, dependent, metadata, device, current_device, current_stream = shortcut
    numel, values_at, codes_at = values.numel(), values.data_ptr(), codes.data_ptr()
    code = made._fp8_dtype
    if (
        values.dtype is not dtype or (code is not code_then and code != code_then)
        or codes.numel() != numel or numel >= LARGE or not values.is_contiguous()
        or (values_at | codes_at) % ALIGNMENT or (current_device is not None and current_device() != device)
    ):  # fmt: skip
        return False
    try:
        launch(  # in the order of `KNOWN_ARGUMENTS`: no scratch memory, no hooks
            programs, 1, 1, current_stream(device), function, cooperative, dependent, None, None, metadata,
            None, None, None,
            values_at, codes_at, made._scale_inv.data_ptr(), row.counts_at, row.sums_at, numel,
            None, None, None, None, None,  # the kernel's compile-time constants, which have to be there
        )  # fmt: skip
    except Exception:
        logger.warning("fp8watch: the short way to count a cast failed; Triton is asked instead", exc_info=True)
        row.last = None
        return False
    row.elements += numel
    return True
