"""The short way to the kernel that counts a cast, on a GPU: it is taken, counts the same, and waits for nothing.

python -m pytest tests/gpu/test_gpu_cast_launch.py -m gpu
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
triton = pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from kernel_cases import SUMS, groups  # noqa: E402

from fp8watch.capture.statistics.count import count_by_torch  # noqa: E402
from fp8watch.capture.te import cast_kernel  # noqa: E402
from fp8watch.capture.te import statistics as te_statistics  # noqa: E402
from fp8watch.capture.te.cast_launch import ALIGNMENT, repeat  # noqa: E402
from fp8watch.capture.te.cast_rows import CastRow, CastRows  # noqa: E402
from fp8watch.capture.te.tensors import scale_of  # noqa: E402
from fp8watch.capture.triton_launch import KNOWN_VERSIONS, is_hooked  # noqa: E402
from fp8watch.emulation.cast import to_float8  # noqa: E402
from fp8watch.formats import E4M3, E5M2  # noqa: E402

is_known = triton.__version__.startswith(KNOWN_VERSIONS)
known = pytest.mark.skipif(not is_known, reason=f"casts are launched through Triton {triton.__version__} itself")
CODE = "kFloat8E4M3"


def row() -> CastRow:
    return CastRows(torch.device("cuda", torch.cuda.current_device()), cast_kernel.PROGRAMS).row(("module", "input"))


def cast(values: torch.Tensor, scale: float = 4.0, code: str = CODE) -> Any:
    factor = torch.full((1,), scale, device=values.device)
    fmt = E4M3 if code == CODE else E5M2
    codes = to_float8(values, factor[0], fmt).view(torch.uint8)
    return SimpleNamespace(_data=codes, _scale_inv=factor.reciprocal(), _fp8_dtype=code)


def first(row: CastRow, values: torch.Tensor, made: Any) -> None:
    """The long way, which opens the short one."""
    fmt = E4M3 if made._fp8_dtype == CODE else E5M2
    assert cast_kernel.add(row, values, made._data, made._scale_inv, fmt=fmt, code=made._fp8_dtype)


@known
def test_the_short_way_counts_what_the_long_one_counts() -> None:
    taken = 0
    for items in groups("cuda", 1 << 22):
        for item in items:
            if item.codes is None or item.scale.numel() != 1:
                continue
            code = "kFloat8E4M3" if item.fmt is E4M3 else "kFloat8E5M2"
            made = SimpleNamespace(_data=item.codes, _scale_inv=item.scale.reshape(1).reciprocal(), _fp8_dtype=code)
            long, short = row(), row()
            first(long, item.values, made)
            warm = torch.zeros(4096, device="cuda", dtype=item.values.dtype)
            first(short, warm, cast(warm, code=code))  # zeros: adds nothing
            assert short.last is not None
            is_aligned = (item.values.data_ptr() | item.codes.data_ptr()) % ALIGNMENT == 0
            assert repeat(short, item.values, item.codes, made) is is_aligned
            if not is_aligned:  # another kernel's
                assert not short.counts.any()
                continue
            taken += 1
            assert torch.equal(long.counts, short.counts)
            assert torch.allclose(long.sums, short.sums, rtol=0.0, atol=0.0, equal_nan=True)
            inverted = scale_of(made._scale_inv).reshape(())
            reference = count_by_torch(type(item)(values=item.values, scale=inverted, fmt=item.fmt, codes=item.codes))
            saturated, before, after, nonfinite = short.counts.sum(0).tolist()
            assert (saturated, before - after, nonfinite) == (
                int(reference.saturated), int(reference.underflowed), int(reference.nonfinite)
            )  # fmt: skip
            wanted = torch.stack([getattr(reference, name) for name in SUMS])
            assert torch.allclose(short.sums.sum(0), wanted, rtol=1e-4, equal_nan=True)
    assert taken > 20


@known
def test_it_runs_on_the_current_stream_and_waits_for_nothing() -> None:
    values = torch.full((1 << 20,), 1.0, device="cuda", dtype=torch.bfloat16)
    made = cast(values)
    found = row()
    first(found, values, made)
    found.counts.zero_()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            values.fill_(1000.0)  # counted after this, if on this stream: 4000 is clipped
            assert repeat(found, values, made._data, made)
        assert not stream.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert found.counts.sum(0)[0].item() == values.numel()
    assert found.elements == values.numel()


@known
def test_a_hook_on_launches_is_told_of_ours() -> None:
    values = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    made, found, heard = cast(values), row(), []
    first(found, values, made)
    assert found.last is not None
    runtime = triton.knobs.runtime
    runtime.launch_enter_hook.add(heard.append)
    try:
        assert is_hooked()
        other = row()
        first(other, values, made)
        assert len(heard) == 1
        assert other.last is None
    finally:
        runtime.launch_enter_hook.remove(heard.append)
        runtime.launch_enter_hook.calls.clear()
    assert not is_hooked()
    assert torch.equal(other.counts, found.counts)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_tensor_of_another_than_the_current_device_is_left_to_torch() -> None:
    values = torch.randn(4096, device="cuda:0", dtype=torch.bfloat16)
    made = cast(values)
    with torch.cuda.device(0):
        found = row()
        first(found, values, made)
    with torch.cuda.device(1):
        assert not repeat(found, values, made._data, made)
        assert not cast_kernel.add(found, values, made._data, made._scale_inv, fmt=E4M3, code=CODE)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each cast went the short way."""
    found: list[bool] = []

    def spied(*args: Any) -> bool:
        found.append(repeat(*args))
        return found[-1]

    monkeypatch.setattr(te_statistics, "repeat", spied)
    return found


def test_casts_of_the_library_are_counted_the_short_way_as_torch_counts_them(taken: list[bool]) -> None:
    te = pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
    recipe = pytest.importorskip("transformer_engine.common.recipe").DelayedScaling()
    from fp8watch.capture.te.delayed import TeDelayedSource

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        te.Linear(256, 512, params_dtype=torch.bfloat16),
        te.LayerNormLinear(512, 512, normalization="RMSNorm", params_dtype=torch.bfloat16),
        te.LayerNormMLP(512, 1024, params_dtype=torch.bfloat16),
        te.Linear(512, 256, params_dtype=torch.bfloat16),
    ).cuda()
    # Within the same steps: one counts by kernel, the other, whose taps lie above, by torch.
    source, ours, theirs = (
        TeDelayedSource(model), te_statistics.TeStatistics(model), te_statistics.TeStatistics(model)
    )  # fmt: skip
    theirs._kernel = None
    ours._fused = theirs._fused = None  # each cast from its source
    try:
        for step in range(5):
            source.begin(with_statistics=False)
            del taken[:]
            ours.begin(is_sampled=True)
            theirs.begin(is_sampled=True)
            for micro in range(2):
                x = torch.randn(1024, 256, device="cuda", dtype=torch.bfloat16) * 4.0 ** (step + micro)
                with te.autocast(enabled=True, recipe=recipe):
                    output = model(x)
                output.float().square().mean().backward()
            reading, columns = source.read(), source.columns()
            right = theirs.add_to(reading, lambda columns=columns: columns)
            found = ours.add_to(reading, lambda columns=columns: columns)
            assert right is not None
            assert found is not None
            for name in ("quantized", "saturated", "underflowed", "nonfinite"):
                assert torch.equal(found.values[name], right.values[name]), name
                assert torch.equal(found.valid[name], right.valid[name])
            seen = found.valid["mse"]
            assert torch.allclose(found.values["mse"][seen], right.values["mse"][seen], rtol=1e-3)
            # An input, a weight and a gradient of each of five GEMMs. In the first step modules have no state yet when
            # their quantizers are looked up.
            assert seen.sum() == (3 if step == 0 else 15)
    finally:
        ours.detach()
        theirs.detach()
        source.detach()
    assert ours._tap.num_failures == theirs._tap.num_failures == 0
    if is_known:
        # Half of the calls are those of `theirs`, which always counts by torch.
        assert taken.count(True) == len(taken) // 2 == 30
