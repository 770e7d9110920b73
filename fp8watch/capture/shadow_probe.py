"""Shadow probe: in a chosen step one FP8 layer's forward GEMM is run again in BF16 on the same input.

The relative error shows whether FP8 harms this layer more than its format always does (`fp8watch.formats.
expected_gemm_error`: 3.8 % for E4M3 x E4M3). Two hooks are on the layer during that step only. The first makes the
reference, while a sharded weight is whole; the second compares and frees it. Only the first training forward of the
step counts; recomputation and evaluation (`module.eval()`) do not. Under `torch.compile` the hooks do nothing, and the
layer is reported as not run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from fp8watch.capture import shadow_gemm
from fp8watch.capture.copied_hooks import StaysHere
from fp8watch.capture.cost_meter import CostMeter
from fp8watch.capture.ring import is_capturing
from fp8watch.capture.shadow_gemm import NotProbeable, Shadow

logger = logging.getLogger(__name__)


class ShadowProbe:
    """Probes one layer at a time: `arm` before a step, `take` after it. Called on the training thread."""

    def __init__(self, modules: Mapping[str, torch.nn.Module], meter: CostMeter) -> None:
        self._meter = meter
        self.not_probeable: dict[str, str] = {}
        """Module -> why it can never be probed."""
        self._modules: dict[str, torch.nn.Module] = {}
        for name, module in modules.items():
            if (reason := shadow_gemm.why_not(module)) is None:
                self._modules[name] = module
            else:
                self.not_probeable[name] = reason
        self._name: str | None = None
        self._handles: list[Any] = []
        self._made: Shadow | None = None
        self._error: torch.Tensor | None = None
        self.missed: dict[str, str] = {}
        """Module -> why its last probe gave nothing, the newest last."""

    @property
    def is_armed(self) -> bool:
        """Whether a layer is being probed."""
        return self._name is not None

    @property
    def names(self) -> list[str]:
        """Modules that can be probed, in order."""
        return list(self._modules)

    def arm(self, name: str) -> bool:
        """Probe the layer's next forward. False: it cannot be probed."""
        self._drop()
        module = self._modules.get(name)
        if module is None:
            return False
        self._name = name
        self._handles = [
            module.register_forward_pre_hook(StaysHere(self.before), with_kwargs=True),
            module.register_forward_hook(StaysHere(self.after)),
        ]
        return True

    def take(self) -> tuple[str, torch.Tensor] | None:
        """`(module, relative error)` of the armed layer, the error 0-D float32; None: no result. Removes the hooks."""
        name, error = self._name, self._error
        self._drop()
        if name is None:
            return None
        if error is None:
            why = self.missed.pop(name, "it did not run in the step of its probe (not called, or compiled)")
            self.missed[name] = why  # the newest last
            return None
        self.missed.pop(name, None)
        return name, error

    def before(self, module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Forward pre-hook: make the reference."""
        if torch.compiler.is_compiling():
            return
        if self._name is None or self._made is not None or self._error is not None:
            return
        if not module.training or torch._C._current_graph_task_id() != -1 or is_capturing():
            return
        given = args[0] if args else next(iter(options.values()), None)
        try:
            if isinstance(given, torch.Tensor):
                with self._meter.piece():
                    self._made = shadow_gemm.shadow(module, given)
        except NotProbeable as error:
            self.missed[self._name] = str(error)
        except Exception as error:
            self._failed(error)

    def after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Forward hook: compare the output with the reference."""
        if torch.compiler.is_compiling():
            return
        made, self._made = self._made, None
        if made is None:
            return
        try:
            with self._meter.piece():
                self._error = shadow_gemm.relative_error(module, output, made)
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """Never probe this layer again: training must not pay for the same failure twice."""
        assert self._name is not None
        logger.warning("fp8watch: the shadow probe of %s failed; training is not affected", self._name, exc_info=error)
        self.not_probeable[self._name] = f"{type(error).__name__}: {error}"
        self.missed[self._name] = self.not_probeable[self._name]
        self._modules.pop(self._name, None)

    def _drop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._name, self._made, self._error = [], None, None, None

    def detach(self) -> None:
        """Remove all hooks."""
        self._drop()
