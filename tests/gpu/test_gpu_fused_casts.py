"""Casts inside norms and activations, counted from their inputs: as torch counts them, and as a second call gives them.

python -m pytest tests/gpu/test_gpu_fused_casts.py -m gpu
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import interpreted
from fused_cases import differences

from fp8watch.capture.te.fused_casts import FUNCTIONS, FusedCasts

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def test_interpreted_kernel_counts_what_torch_counts():
    interpreted.run("fused_cases.py")


@pytest.mark.gpu
@on_gpu
def test_kernel_counts_what_torch_counts():
    from fp8watch.capture.te import cast_kernel, fused_cast_kernel

    fused = FusedCasts(fused_cast_kernel, cast_kernel)
    assert list(differences(fused, cast_kernel.PROGRAMS, "cuda")) == []
    assert {launch.name for launch in fused._launches.values()} == FUNCTIONS.keys()


ACTIVATIONS = {
    "gelu": {"gelu", "dbias_dgelu"}, "relu": {"relu", "dbias_drelu"}, "srelu": {"srelu", "dbias_dsrelu"},
    "qgelu": {"qgelu", "dbias_dqgelu"}, "swiglu": {"swiglu", "dswiglu"}, "geglu": {"geglu", "dgeglu"},
    "reglu": {"reglu", "dreglu"},
}  # fmt: skip


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_library_is_counted_without_second_calls_as_with_them(activation: str, monkeypatch: Any) -> None:
    te = pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
    recipe = pytest.importorskip("transformer_engine.common.recipe").DelayedScaling()
    from fp8watch.capture.te.delayed import TeDelayedSource
    from fp8watch.capture.te.statistics import TeStatistics

    torch.manual_seed(0)
    is_layer_norm = activation in ("gelu", "geglu")
    model = te.LayerNormMLP(
        256, 1024, activation=activation, params_dtype=torch.bfloat16,
        normalization="LayerNorm" if is_layer_norm else "RMSNorm", zero_centered_gamma=activation == "geglu",
    ).cuda()  # fmt: skip
    again: list[int] = []
    count_again = TeStatistics.count_again
    # Within the same steps: one counts from the inputs, the other, whose taps lie above, by second calls.
    source, ours, theirs = TeDelayedSource(model), TeStatistics(model), TeStatistics(model)
    theirs._fused = None
    monkeypatch.setattr(
        TeStatistics, "count_again", lambda self, *args: (again.append(id(self)), count_again(self, *args))[1]
    )
    try:
        for step in range(5):
            source.begin(with_statistics=False)
            torch.cuda.synchronize()  # the trial's numbers have arrived
            del again[:]
            ours.begin(is_sampled=True)
            theirs.begin(is_sampled=True)
            x = torch.randn(1024, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            with te.autocast(enabled=True, recipe=recipe):
                output = model(x)
            torch.cuda.set_sync_debug_mode("error")
            output.float().square().mean().backward()
            torch.cuda.set_sync_debug_mode("default")
            reading, columns = source.read(), source.columns()
            right = theirs.add_to(reading, lambda columns=columns: columns)
            found = ours.add_to(reading, lambda columns=columns: columns)
            assert right is not None
            assert found is not None
            for name in ("quantized", "nonfinite"):
                assert torch.equal(found.values[name], right.values[name]), name
            seen = found.valid["mse"]
            assert torch.equal(seen, right.valid["mse"])
            elements = right.values["quantized"][seen]
            for name in ("saturated", "underflowed"):
                gap = (found.values[name] - right.values[name])[seen].abs() / elements
                assert gap.max() < 2e-3, (step, name, gap)
            assert torch.allclose(found.values["mse"][seen], right.values["mse"][seen], rtol=0.02)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        ours.detach()
        theirs.detach()
        source.detach()
    assert ours._tap.num_failures == theirs._tap.num_failures == 0
    norm = "layernorm_fwd" if is_layer_norm else "rmsnorm_fwd"
    verdicts = ours._fused._is_right
    print(activation, verdicts)
    assert verdicts.get(norm) is True
    assert [name for name, is_right in verdicts.items() if not is_right] == []
    assert ACTIVATIONS[activation] & verdicts.keys()
    assert id(ours) not in again
    assert id(theirs) in again
