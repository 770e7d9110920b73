"""The short way to the kernel that counts a cast: when it is taken, what it hands over, that it counts the same."""

from __future__ import annotations

import ctypes
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from standin_te.tensors import DType, Float8TensorStorage
from test_te_statistics import Extension, Linear, counts

from fp8watch.capture.cost_meter import CostMeter
from fp8watch.capture.statistics.count import count_made
from fp8watch.capture.te import cast_launch
from fp8watch.capture.te.cast_launch import repeat
from fp8watch.capture.te.cast_rows import CastRow, CastRows
from fp8watch.capture.te.statistics import TeStatistics
from fp8watch.capture.triton_launch import KNOWN_ARGUMENTS, Shortcut, is_hooked, shortcut

FUNCTION, STREAM, DEVICE, METADATA = 111, 222, 0, (8, 1, 96)


def short(launch: Any, *, device: int = DEVICE) -> Shortcut:
    return Shortcut(launch, 512, FUNCTION, False, False, METADATA, DEVICE, lambda: device, lambda _: STREAM)


def memory(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * (numel * dtype.itemsize)).from_address(address), dtype=dtype)


class Kernel:
    """Counts by torch: a first cast from its tensors, later ones at the addresses that are launched."""

    PROGRAMS = 1

    def __init__(self) -> None:
        self.first = self.launched = 0

    def add(self, row: CastRow, values: Any, codes: Any, inverse: Any, *, fmt: Any, code: Any) -> bool:
        self.first += 1
        self._add(row.counts[0], row.sums[0], values.reshape(-1), codes.reshape(-1), inverse, fmt)
        dtype = values.dtype

        def launch(*args: Any) -> None:
            self.launched += 1
            values_at, codes_at, inverse_at, counts_at, sums_at, numel = args[13:19]
            self._add(
                memory(counts_at, 4, torch.int64), memory(sums_at, 2, torch.float32), memory(values_at, numel, dtype),
                memory(codes_at, numel, torch.uint8), memory(inverse_at, 1, torch.float32), fmt,
            )  # fmt: skip

        row.last = (short(launch), dtype, code)
        return True

    def _add(self, counts: Any, sums: Any, values: Any, codes: Any, inverse: Any, fmt: Any) -> None:
        found = count_made(values, inverse.reciprocal().reshape(()), fmt, codes)
        before = torch.count_nonzero(values)
        counts += torch.stack([found.saturated, before, before - found.underflowed, found.nonfinite])
        sums += torch.stack([found.squared_error, found.squared_values])


def train(kernel: Kernel | None) -> tuple[list[dict[str, dict[str, float]]], TeStatistics]:
    """Counts of three sampled steps with micro-batches of several sizes, norms, activations and gradients."""
    torch.manual_seed(0)
    model, extension = torch.nn.ModuleDict({"a": Linear(4.0), "b": Linear(0.01)}), Extension()
    statistics = TeStatistics(model, extension=extension)
    statistics._kernel = kernel
    found = []
    try:
        for _ in range(3):
            statistics.begin(is_sampled=True)
            for rows in (4, 8, 8):
                x = torch.randn(rows, 8) * torch.tensor([1e-5, 1.0, 300.0, 0.0, 1e6, float("nan"), 1.0, 2.0])
                forward, backward = model["a"].quantizers["scaling_fwd"], model["b"].quantizers["scaling_bwd"]
                extension.quantize(x, forward[0])
                extension.quantize(model["a"].weight, forward[1])
                extension.layernorm_fwd(
                    x, torch.ones(8), torch.zeros(8), 1e-5, None, model["b"].quantizers["scaling_fwd"][0], None, 0, 0
                )
                extension.bgrad_quantize(x * 0.5, backward[0])
                extension.dbias_dgelu(x, x, model["a"].quantizers["scaling_bwd"][0])
            found.append(counts(statistics))
    finally:
        statistics.detach()
    return found, statistics


def test_casts_like_the_last_one_are_launched_at_once_and_counted_the_same():
    expected, _ = train(None)
    kernel = Kernel()
    found, _ = train(kernel)
    assert (kernel.first, kernel.launched) == (5, 3 * 3 * 5 - 5)
    assert len(found[0]) == 5
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, row in theirs.items():
            assert ours[name] == pytest.approx(row, rel=1e-6, nan_ok=True)
            for count in ("quantized", "saturated", "underflowed", "nonfinite"):
                assert ours[name][count] == row[count]


@pytest.mark.usefixtures("_one_row")
class TestRepeat:
    @pytest.fixture
    def _one_row(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.row = CastRows(torch.device("cpu"), 1).row(("a", "input"))
        self.row.last = (short(lambda *args: self.calls.append(args)), torch.float32, DType.kFloat8E4M3)
        self.values, self.codes = torch.zeros(4, 8), torch.zeros(4, 8, dtype=torch.uint8)
        self.made = Float8TensorStorage(self.codes, torch.ones(1), DType.kFloat8E4M3)

    def test_hands_over_what_the_library_does(self):
        assert repeat(self.row, self.values, self.codes, self.made)
        (call,) = self.calls
        assert call == (
            512, 1, 1, STREAM, FUNCTION, False, False, None, None, METADATA, None, None, None, self.values.data_ptr(),
            self.codes.data_ptr(), self.made._scale_inv.data_ptr(), self.row.counts_at, self.row.sums_at, 32,
            None, None, None, None, None,
        )  # fmt: skip
        assert self.row.elements == 32
        assert len(call) == len(KNOWN_ARGUMENTS) + 11  # the kernel's parameters

    def test_another_size_is_no_matter_because_rows_may_have_moved(self):
        rows = CastRows(torch.device("cpu"), 1)
        row = rows.row(("a", "input"))
        row.last, before = self.row.last, row.counts_at
        for i in range(200):
            rows.row((f"m{i}", "input"))
        rows.clear()
        assert row.counts_at == row.counts.data_ptr() != before
        assert repeat(row, self.values[:2], self.codes[:2], self.made)
        assert self.calls[0][16:19] == (row.counts_at, row.sums_at, 16)

    @pytest.mark.parametrize(
        "change", ["none yet", "dtype", "format", "sizes", "order", "address", "current device", "too large"]
    )
    def test_another_kind_of_cast_is_not_launched(self, change, monkeypatch):
        values, codes = self.values, self.codes
        if change == "none yet":
            self.row.last = None
        elif change == "dtype":
            values = values.bfloat16()
        elif change == "format":
            self.made._fp8_dtype = DType.kFloat8E5M2
        elif change == "sizes":
            codes = codes[:3]
        elif change == "order":
            values = torch.zeros(8, 4).t()
        elif change == "address":
            values = torch.zeros(33)[1:].view(4, 8)
        elif change == "current device":
            self.row.last = (short(print, device=DEVICE + 1), *self.row.last[1:])
        else:
            monkeypatch.setattr(cast_launch, "LARGE", 32)
        assert not repeat(self.row, values, codes, self.made)
        assert self.calls == []
        assert self.row.elements == 0


class Launcher:
    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True
    launch = print


@pytest.fixture
def library(monkeypatch):
    """Triton 3.6 and a torch with CUDA, as far as they are asked."""
    hook = SimpleNamespace(calls=[])
    knobs = SimpleNamespace(runtime=SimpleNamespace(launch_enter_hook=hook, launch_exit_hook=SimpleNamespace(calls=[])))
    driver = SimpleNamespace(_BASE_ARGS_FORMAT=KNOWN_ARGUMENTS, CudaLauncher=Launcher)
    nvidia = SimpleNamespace(driver=driver)
    triton = SimpleNamespace(__version__="3.6.0", knobs=knobs, backends=SimpleNamespace(nvidia=nvidia))
    modules = {"triton": triton, "triton.backends": triton.backends, "triton.backends.nvidia": nvidia}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: DEVICE, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: STREAM, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    compiled = SimpleNamespace(run=Launcher(), function=FUNCTION, packed_metadata=METADATA)
    return SimpleNamespace(triton=triton, driver=driver, compiled=compiled, hook=hook, knobs=knobs)


def test_the_short_way_is_known_of_one_version(library, monkeypatch):
    found = shortcut(library.compiled, 512, DEVICE)
    assert found is not None
    assert found[:7] == (print, 512, FUNCTION, False, True, METADATA, DEVICE)
    assert found.current_device() == DEVICE
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert shortcut(library.compiled, 512, DEVICE).current_device is None  # there is no other


@pytest.mark.parametrize(
    "change", ["version", "arguments", "launcher", "scratch", "wrapped", "device", "no torch function", "no Triton"]
)
def test_anything_unknown_goes_the_long_way(library, monkeypatch, change):
    if change == "version":
        library.triton.__version__ = "3.7.0"
    elif change == "arguments":
        library.driver._BASE_ARGS_FORMAT = KNOWN_ARGUMENTS + "O"
    elif change == "launcher":
        library.compiled.run = SimpleNamespace(**{name: getattr(Launcher, name) for name in vars(Launcher)})
    elif change == "scratch":
        library.compiled.run.global_scratch_size = 64
    elif change == "wrapped":
        library.compiled.run.launch = lambda *_: None
    elif change == "device":
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: DEVICE + 1)
    elif change == "no torch function":
        monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream")
    else:
        monkeypatch.setitem(sys.modules, "triton", None)
    assert shortcut(library.compiled, 512, DEVICE) is None


def test_a_profiler_that_hears_of_launches_hears_of_ours(library):
    assert not is_hooked()
    kernel = Kernel()
    _, statistics = train(kernel)
    library.hook.calls.append(print)
    assert is_hooked()
    assert all(row.last is not None for row in statistics.rows)
    statistics.begin(is_sampled=True)
    statistics.detach()
    assert all(row.last is None for row in statistics.rows)
    library.knobs.runtime.launch_enter_hook = print  # no chain
    assert is_hooked()


def test_every_counted_cast_is_a_piece_and_no_other_is():
    torch.manual_seed(0)
    model, extension = torch.nn.ModuleDict({"a": Linear(4.0), "b": Linear(0.01)}), Extension()
    statistics = TeStatistics(model, extension=extension)
    meter = CostMeter(torch.device("cpu"))
    statistics.meters = {"statistics": meter, "what_if": CostMeter(torch.device("cpu"))}
    statistics.begin(is_sampled=True)
    try:
        quantizer = model["a"].quantizers["scaling_fwd"][0]
        for _ in range(20):
            extension.quantize(torch.ones(2, 8), quantizer)
            extension.gelu(torch.ones(2, 8), quantizer)
            extension.quantize(torch.ones(2, 8), SimpleNamespace(scale=torch.ones(1), fmt="kFloat8E4M3"))
        model.eval()
        extension.gelu(torch.ones(2, 8), quantizer)
        assert next(meter.numbers()[0]) == 40
        meter.close_step()
        (seconds,) = meter.take()
        assert 0.0 < seconds < 1.0
    finally:
        statistics.detach()


def test_two_threads_cast_at_the_same_time() -> None:
    """As the forward pass of one stage and the backward pass of another."""
    modules, extension = {name: Linear(0.01) for name in "ab"}, Extension()
    statistics = TeStatistics(torch.nn.ModuleDict(modules), extension=extension)
    statistics._kernel = Kernel()
    meter = CostMeter(torch.device("cpu"))
    statistics.meters = {"statistics": meter, "what_if": CostMeter(torch.device("cpu"))}
    start = threading.Barrier(2)

    def cast(name: str, number: int) -> None:
        start.wait()
        for _ in range(number):
            extension.quantize(torch.full((2, 8), 1e-6), modules[name].quantizers["scaling_fwd"][0])

    def both(number: int) -> dict[str, dict[str, float]]:
        statistics.begin(is_sampled=True)
        threads = [threading.Thread(target=cast, args=(name, number)) for name in modules]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return counts(statistics)

    try:
        both(1)  # rows are made
        assert statistics.rows is not None
        assert [row.number for row in statistics.rows] == [0, 1]
        assert next(meter.numbers()[0]) == 2
        found = both(300)
        for count in ("quantized", "underflowed"):
            assert {name: row[count] for name, row in found.items()} == {"a:input": 4800, "b:input": 4800}
        assert next(meter.numbers()[0]) == 603  # with those before, and the number asked for
    finally:
        statistics.detach()
