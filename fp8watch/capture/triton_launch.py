"""The shortest way to launch a compiled Triton kernel: the C function at the end of Triton's own way.

Where launching is the bottleneck, most of a launch through Triton's compiled kernel is Python: objects for hooks that
are not set, two chains of hooks, closures for scratch memory that is not needed. What is called here is the C function
at the end of it, with the same arguments (Triton 3.6.0 `compiler/compiler.py` 490, `backends/nvidia/driver.py` 708,
`driver.py` 459 for their order). That is no public interface: `shortcut` gives None unless everything is as known.

Importing this does not need Triton.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any, NamedTuple

import torch

logger = logging.getLogger(__name__)

KNOWN_VERSIONS = ("3.6.",)
"""Triton's versions whose C function takes its arguments in the order used here."""
KNOWN_ARGUMENTS = "iiiKKppOOOOOO"
"""What these versions say of it: grid, stream, function; cooperative, dependent; two scratch memories, metadata of
kernel and launch, hooks before and after. The kernel's own arguments follow."""


class Shortcut(NamedTuple):
    """What a launch of one compiled kernel on one device needs apart from the kernel's own arguments."""

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
        is_as_known = (
            triton.__version__.startswith(KNOWN_VERSIONS)
            and driver._BASE_ARGS_FORMAT == KNOWN_ARGUMENTS
            and type(launcher) is driver.CudaLauncher
            and type(launcher.launch) is BuiltinFunctionType
            and not (launcher.global_scratch_size or launcher.profile_scratch_size)
        )
        if not is_as_known or torch._C._cuda_getDevice() != device:
            return None
        return Shortcut(
            launcher.launch, programs, compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl,
            compiled.packed_metadata, device, torch._C._cuda_getDevice if torch.cuda.device_count() > 1 else None,
            torch._C._cuda_getCurrentRawStream,
        )  # fmt: skip
    except Exception:  # whatever it is, it is not as known
        logger.debug("fp8watch: this Triton has no known short way to launch a kernel", exc_info=True)
        return None


def is_known() -> bool:
    """Whether this Triton, with NVIDIA's driver in use, is one of those that `shortcut` knows."""
    try:
        import triton
        from triton.runtime import driver
    except ImportError:
        return False
    try:
        backend: str = driver.active.get_current_target().backend
    except Exception:  # no driver, or another one
        return False
    return backend == "cuda" and triton.__version__.startswith(KNOWN_VERSIONS)


def is_hooked() -> bool:
    """Whether somebody (a profiler) wants to hear of Triton's launches, which the short way does not tell."""
    try:
        from triton import knobs
    except ImportError:
        return False
    try:
        return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)
    except AttributeError:  # not the chains that are known
        return True
