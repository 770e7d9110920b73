"""Launches the kernel that counts a cast the shortest way: a row's cast that is like the row's last one.

On a launch-bound model nearly all of a logging step's extra time is launching these kernels, and most of a launch
through Triton's compiled kernel is Python: objects for hooks that are not set, two chains of hooks, closures for
scratch memory that is not needed. What is called here is the C function at the end of it, with the same arguments
(Triton 3.6.0 `compiler/compiler.py` 490, `backends/nvidia/driver.py` 708, `driver.py` 459 for their order). That is no
public interface: `shortcut` gives None unless everything is as known, and then casts are launched through Triton.

Importing this does not need Triton.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any, NamedTuple

import torch

from fp8watch.capture.te.cast_rows import CastRow

logger = logging.getLogger(__name__)

ALIGNMENT = 16
"""Bytes. Triton compiles another kernel for addresses that are not a multiple of this."""
LARGE = 2**31
"""From this number of elements on, the number takes 64 bits, and another kernel."""
KNOWN_VERSIONS = ("3.6.",)
"""Triton's versions whose C function takes its arguments in the order used here."""
KNOWN_ARGUMENTS = "iiiKKppOOOOOO"
"""What these versions say of it: grid, stream, function; cooperative, dependent; two scratch memories, metadata of
kernel and launch, hooks before and after. The kernel's own arguments follow."""


class Shortcut(NamedTuple):
    """What a launch of one compiled kernel needs apart from the cast. Holds for casts of one kind on one device."""

    launch: Callable[..., object]
    """The C function."""
    programs: int
    function: int
    """Address of the kernel."""
    is_cooperative: bool
    is_dependent: bool
    metadata: tuple[int, ...]
    """Warps, blocks in a cluster, bytes of shared memory."""
    device: int
    current_device: Callable[[], int] | None
    """None where there is only one device."""
    current_stream: Callable[[int], int]
    """Of a device; as an address."""


def shortcut(compiled: Any, programs: int, device: int) -> Shortcut | None:
    """The short way to a kernel that has been launched once on this device; None: this Triton is not as known."""
    try:
        import triton
        from triton.backends.nvidia import driver

        launcher = compiled.run
        is_known = (
            triton.__version__.startswith(KNOWN_VERSIONS)
            and driver._BASE_ARGS_FORMAT == KNOWN_ARGUMENTS
            and type(launcher) is driver.CudaLauncher
            and type(launcher.launch) is BuiltinFunctionType
            and not (launcher.global_scratch_size or launcher.profile_scratch_size)
        )
        if not is_known or torch._C._cuda_getDevice() != device:
            return None
        return Shortcut(
            launcher.launch, programs, compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl,
            compiled.packed_metadata, device, torch._C._cuda_getDevice if torch.cuda.device_count() > 1 else None,
            torch._C._cuda_getCurrentRawStream,
        )  # fmt: skip
    except Exception:  # whatever it is, it is not as known
        logger.debug("fp8watch: casts are launched through Triton", exc_info=True)
        return None


def is_hooked() -> bool:
    """Whether somebody (a profiler) wants to hear of Triton's launches, which the short way does not tell. Ask it in
    each logging step."""
    try:
        from triton import knobs
    except ImportError:
        return False
    try:
        return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)
    except AttributeError:  # not the chains that are known
        return True


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
    launch(  # in the order of `KNOWN_ARGUMENTS`: no scratch memory, no hooks
        programs, 1, 1, current_stream(device), function, cooperative, dependent, None, None, metadata,
        None, None, None,
        values_at, codes_at, made._scale_inv.data_ptr(), row.counts_at, row.sums_at, numel,
        None, None, None, None, None,  # the kernel's compile-time constants, which have to be there
    )  # fmt: skip
    row.elements += numel
    return True
