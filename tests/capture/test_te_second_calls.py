"""Functions that cast their result inside are called a second time for its source: what that call may not do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_te_statistics import Extension, Linear

from fp8watch.capture.te.statistics import TeStatistics


@pytest.mark.parametrize("name", ["layernorm_fwd", "gelu", "gelu by name", "dbias_dgelu"])
def test_the_second_call_leaves_training_alone(name):
    """It gets no quantizer and no buffer of the model's, adds nothing to autograd's graph, and keeps other options."""
    seen: list[tuple[Any, Any, bool]] = []

    class Recording(Extension):
        def layernorm_fwd(self, x, weight, bias, eps, ln_out, quantizer, *others):
            assert others == (None, 0, False)
            seen.append((ln_out, quantizer, torch.is_grad_enabled()))
            return super().layernorm_fwd(x, weight, bias, eps, ln_out, quantizer, *others)

        def gelu(self, x, quantizer):
            seen.append((None, quantizer, torch.is_grad_enabled()))
            return super().gelu(x, quantizer)

        def dgelu(self, grad, x, quantizer):
            seen.append((None, quantizer, torch.is_grad_enabled()))
            return super().dgelu(grad, x, quantizer)

    model, extension = torch.nn.ModuleDict({"a": Linear(1.0)}), Recording()
    statistics, quantizer = TeStatistics(model, extension=extension), model["a"].quantizers["scaling_fwd"][0]
    statistics.begin(is_sampled=True)
    try:
        x, buffer = torch.randn(2, 8), object()
        if name == "layernorm_fwd":
            extension.layernorm_fwd(x, torch.ones(8), torch.zeros(8), 1e-5, buffer, quantizer, None, 0, False)
        elif name == "dbias_dgelu":
            extension.dbias_dgelu(x, x, quantizer)
        elif name == "gelu":
            extension.gelu(x, quantizer)
        else:
            extension.gelu(x, quantizer=quantizer)
        given = buffer if name == "layernorm_fwd" else None
        first = [] if name == "dbias_dgelu" else [(given, quantizer, True)]
        assert seen == [*first, (None, None, False)]
    finally:
        statistics.detach()
