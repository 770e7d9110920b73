"""When casts are counted from the inputs of their function: after a trial that agrees, and for calls that are known."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8watch.capture.te import fused_casts
from fp8watch.capture.te.cast_rows import CastRow, CastRows
from fp8watch.capture.te.fused_casts import MOST_TRIALS, FusedCasts, operands_of
from fp8watch.formats import E4M3


class Kernel:
    """Writes given sums in place of computing them."""

    EACH, SOURCES, PROGRAMS = 16, {torch.bfloat16: None, torch.float32: None}, 1

    def __init__(self, sums: tuple[float, float]) -> None:
        self.sums = sums
        self.num_launched = 0

    def constants(self, form: str, activation: str, fmt: Any, *, is_zero_centered: bool) -> tuple[Any, ...]:
        return (form, activation, is_zero_centered)

    def launch(self, tensors: Any, numel: int, width: int, constants: Any) -> Any:
        self.num_launched += 1
        tensors[-1][0] += torch.tensor(self.sums)
        return object()

    def add(self, row: CastRow, values: Any, codes: Any, inverse: Any, *, fmt: Any) -> bool:
        row.sums[0] += torch.tensor((2.0, 100.0))
        return True


class Arrived:
    def __init__(self) -> None:
        self.has_arrived = True

    def query(self) -> bool:
        return self.has_arrived


@pytest.fixture
def event(monkeypatch: pytest.MonkeyPatch) -> Arrived:
    event = Arrived()
    monkeypatch.setattr(fused_casts, "_to_host", lambda sums: fused_casts._Trial(sums.clone(), event))
    return event


X = torch.randn(4, 32)
MADE = SimpleNamespace(_data=torch.zeros(4, 32, dtype=torch.uint8), _scale_inv=torch.ones(1), _fp8_dtype="kFloat8E4M3")


def row() -> CastRow:
    return CastRows(torch.device("cpu"), 1).row(("a", "input"))


def tried(kernel: Kernel, made: Any = MADE) -> FusedCasts:
    casts = FusedCasts(kernel, kernel)
    casts.try_out("gelu", (X, "q"), {}, None, X, made, E4M3)
    return casts


@pytest.mark.parametrize(
    ("sums", "is_right"),
    [((2.0, 100.0), True), ((2.01, 100.1), True), ((2.2, 100.0), False), ((2.0, 103.0), False), ((0.0, 0.0), False)],
)
def test_only_a_function_whose_trial_agrees_is_counted_from_its_inputs(event, sums, is_right):
    kernel = Kernel(sums)
    casts = tried(kernel)
    assert not casts.knows("gelu"), "not before its numbers are there"
    casts.begin()
    assert casts.knows("gelu") is is_right
    assert not casts.knows("silu")
    casts.try_out("gelu", (X, "q"), {}, None, X, MADE, E4M3)
    assert kernel.num_launched == 1, "one trial"
    found = row()
    if is_right:
        assert casts.count(found, "gelu", (X, "q"), {}, None, MADE)
        assert found.elements == X.numel()


def test_numbers_that_are_on_their_way_decide_nothing(event):
    casts = tried(Kernel((2.0, 100.0)))
    event.has_arrived = False
    casts.begin()
    assert not casts.knows("gelu")
    event.has_arrived = True
    casts.begin()
    assert casts.knows("gelu")


def test_a_trial_of_zeros_is_made_again_but_not_for_ever(event, monkeypatch):
    kernel = Kernel((0.0, 0.0))
    monkeypatch.setattr(Kernel, "add", lambda *args, **options: True)
    casts = FusedCasts(kernel, kernel)
    for _ in range(2 * MOST_TRIALS):
        casts.try_out("gelu", (X, "q"), {}, None, X, MADE, E4M3)
        casts.begin()
    assert kernel.num_launched == MOST_TRIALS
    assert not casts.knows("gelu")


def test_a_kernel_that_raises_is_not_asked_again(event, caplog):
    kernel = Kernel((2.0, 100.0))
    casts = tried(kernel)
    casts.begin()
    kernel.launch = lambda *args: 1 / 0  # type: ignore[method-assign]
    found = row()
    assert not casts.count(found, "gelu", (X, "q"), {}, None, MADE)
    assert found.elements == 0
    assert not casts.knows("gelu")
    assert "gelu is called again" in caplog.text


@pytest.mark.parametrize(
    "made",
    [
        SimpleNamespace(_data=torch.zeros(3, 5, dtype=torch.uint8)),  # another number of elements
        SimpleNamespace(_data=torch.zeros(129, dtype=torch.uint8)[1:]),  # no whole loads
        SimpleNamespace(_data=torch.zeros(128, dtype=torch.int8)),
    ],
)
def test_a_cast_that_the_kernel_cannot_read_needs_its_source(event, made):
    made._scale_inv, made._fp8_dtype = torch.ones(1), "kFloat8E4M3"
    kernel = Kernel((2.0, 100.0))
    casts = tried(kernel)
    casts.begin()
    found = row()
    assert not casts.count(found, "gelu", (X, "q"), {}, None, made)
    assert found.elements == 0
    assert kernel.num_launched == 1


def test_a_tensor_that_only_stands_for_others_is_not_read(event):
    class Other(torch.Tensor):
        pass

    kernel = Kernel((2.0, 100.0))
    casts = tried(kernel)
    casts.begin()
    assert not casts.count(row(), "gelu", (X.as_subclass(Other), "q"), {}, None, MADE)
    assert not casts.count(row(), "gelu", (X.to("meta"), "q"), {}, None, MADE)
    assert kernel.num_launched == 1


W, MEAN = torch.ones(32), torch.zeros(4)


@pytest.mark.parametrize(
    ("name", "args", "options", "result", "numel", "width", "is_zero_centered"),
    [
        ("layernorm_fwd", (X, W, W, 1e-5, None, "q", None, 0, True), {}, (None, MEAN, MEAN), 128, 32, True),
        ("rmsnorm_fwd", (X, W, 1e-5, None, "q", None, 0, False), {}, (None, None, MEAN), 128, 32, False),
        (
            "rmsnorm_fwd",
            (X, W, 1e-5, None, "q", None),
            {"zero_centered_gamma": True},
            (None, None, MEAN),
            128,
            32,
            True,
        ),
        ("gelu", (X, "q"), {}, None, 128, 32, False),
        ("dgelu", (X, X, "q"), {}, None, 128, 32, False),
        ("dbias_dgelu", (X, X, "q"), {}, None, 128, 32, False),
        ("swiglu", (X, "q"), {}, None, 64, 16, False),
        ("dswiglu", (X[:, :16].contiguous(), X, "q"), {}, None, 128, 32, False),
    ],
)
def test_operands_of_a_call(name, args, options, result, numel, width, is_zero_centered):
    found = operands_of(name, args, options, result)
    assert found is not None
    assert (found.numel, found.width, found.is_zero_centered) == (numel, width, is_zero_centered)
    assert found.tensors[0] is args[0]


@pytest.mark.parametrize(
    ("name", "args", "result"),
    [
        ("rmsnorm_fwd", (X, W, 1e-5, None, "q", None, 0), (None, None, MEAN)),  # centred or not?
        ("rmsnorm_fwd", (X, W, 1e-5, None, "q", None, 0, False), (None, None, MEAN.double())),
        ("layernorm_fwd", (X, W, None, 1e-5, None, "q", None, 0, False), (None, MEAN, MEAN)),
        ("layernorm_fwd", (X, W, W[:16], 1e-5, None, "q", None, 0, False), (None, MEAN, MEAN)),
        ("layernorm_fwd", (X, torch.ones(64)[::2], W, 1e-5, None, "q", None, 0, False), (None, MEAN, MEAN)),
        ("layernorm_fwd", (X, W, W, 1e-5, None, "q", None, 0, False), (None, None, MEAN)),
        ("layernorm_fwd", (X, W, W, 1e-5, None, "q", None, 0, False), (None, MEAN[:2], MEAN)),
        ("rmsnorm_fwd", (X, W, 1e-5, None, "q", None, 0, False), (None, None, torch.zeros(8)[::2])),
        ("rmsnorm_fwd", (X.t(), torch.ones(4), 1e-5, None, "q", None, 0, False), (None, None, torch.ones(32))),
        ("gelu", (X.t(), "q"), None),
        ("dgelu", (X, X.t(), "q"), None),
        ("dgelu", (X[:2], X, "q"), None),
        ("dswiglu", (X, X, "q"), None),
    ],
)
def test_a_call_that_is_not_as_known_is_left_to_the_second_call(name, args, result):
    assert operands_of(name, args, {}, result) is None


class Compiled:
    """A kernel that is launched again by address."""

    packed_metadata = ()

    def __init__(self) -> None:
        self.addresses: list[tuple[int, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: self.addresses.append(arguments[:7])


def known(event: Arrived, name: str, args: Any, result: Any = None) -> tuple[FusedCasts, CastRow, Compiled]:
    """A function that is known, and a row whose last cast was its."""
    compiled = Compiled()

    class Again(Kernel):
        def launch(self, *args: Any) -> Any:
            super().launch(*args)
            return compiled

    kernel, found = Again((2.0, 100.0)), row()
    casts = FusedCasts(kernel, kernel)
    casts.try_out(name, args, {}, result, X, MADE, E4M3)
    casts.begin()
    assert casts.knows(name)
    assert casts.count(found, name, args, {}, result, MADE)
    assert (kernel.num_launched, len(compiled.addresses), found.elements) == (1, 1, X.numel())
    return casts, found, compiled


def test_a_kernel_that_was_launched_is_never_launched_for_a_tensor_without_memory(event):
    """Address 0 would end the training."""
    norm = (X, torch.ones(32), 1e-5, None, "q", None, 0, False)
    spread = torch.zeros(4)
    casts, found, compiled = known(event, "rmsnorm_fwd", norm, (None, None, spread))
    empty = SimpleNamespace(_data=MADE._data, _scale_inv=MADE._scale_inv.to("meta"), _fp8_dtype=MADE._fp8_dtype)
    for args, result, made in (
        (norm, (None, None, spread.to("meta")), MADE),
        ((X.to("meta"), *norm[1:]), (None, None, spread), MADE),
        ((X, norm[1].to("meta"), *norm[2:]), (None, None, spread), MADE),
        (norm, (None, None, spread), empty),
    ):
        assert not casts.count(found, "rmsnorm_fwd", args, {}, result, made)
    assert (len(compiled.addresses), found.elements) == (1, X.numel())
    assert casts.count(found, "rmsnorm_fwd", norm, {}, (None, None, spread), MADE)
    assert found.elements == 2 * X.numel()


def test_a_cast_is_counted_once_though_the_next_one_cannot_be_launched(event, monkeypatch):
    kernel = Kernel((2.0, 100.0))
    casts = tried(kernel)
    casts.begin()
    monkeypatch.setattr(Kernel, "launch", lambda *args: SimpleNamespace(packed_metadata=()))  # and no grid
    found = row()
    assert casts.count(found, "gelu", (X, "q"), {}, None, MADE), "a second call would count it twice"
    assert found.elements == X.numel()
    assert not casts.knows("gelu")


def test_two_names_of_one_format_are_two_kernels(event):
    casts, found, compiled = known(event, "gelu", (X, "q"))
    other = SimpleNamespace(_data=MADE._data, _scale_inv=MADE._scale_inv, _fp8_dtype=4)
    assert not casts.count(found, "gelu", (X, "q"), {}, None, other), "which format is that?"
    casts._formats[4] = E4M3
    assert casts.count(found, "gelu", (X, "q"), {}, None, other)
    assert casts.knows("gelu")
    assert casts.count(found, "gelu", (X, "q"), {}, None, MADE)
    assert found.elements == 3 * X.numel()
    assert len(compiled.addresses) == 2


def test_a_half_row_that_no_thread_takes_whole_needs_its_source(event):
    """A thread would read half of its elements past the row, and past the tensor's end."""
    x, grad = torch.randn(4, 48), torch.randn(4, 24)
    made = SimpleNamespace(_data=torch.zeros(4, 48, dtype=torch.uint8), _scale_inv=torch.ones(1), _fp8_dtype="code")
    kernel = Kernel((2.0, 100.0))
    casts = FusedCasts(kernel, kernel)
    casts.try_out("dswiglu", (grad, x, "q"), {}, None, x, made, E4M3)
    assert not casts._add(row(), "dswiglu", operands_of("dswiglu", (grad, x, "q"), {}, None), made)
    assert kernel.num_launched == 0


@pytest.mark.parametrize("outcome", [(2.0, 100.0), "raises"])
def test_threads_that_meet_a_function_at_once_start_one_trial(event, monkeypatch, outcome):
    kernel = Kernel((2.0, 100.0))
    launch, together = kernel.launch, threading.Barrier(2)
    failed: list[BaseException] = []

    def slow(*args: Any) -> Any:
        time.sleep(0.05)
        if outcome == "raises":
            raise RuntimeError("no memory")
        return launch(*args)

    monkeypatch.setattr(kernel, "launch", slow)
    casts = FusedCasts(kernel, kernel)

    class Slow(Counter):
        def __setitem__(self, name: str, number: int) -> None:
            time.sleep(0.05)  # until the other thread is as far
            super().__setitem__(name, number)

    casts._num_trials = Slow()

    def work() -> None:
        together.wait()
        try:
            casts.try_out("gelu", (X, "q"), {}, None, X, MADE, E4M3)
        except BaseException as error:
            failed.append(error)

    run_both(work)
    assert failed == []
    assert casts._num_trials["gelu"] == 1
    casts.begin()
    assert casts.knows("gelu") is (outcome != "raises")


def test_threads_that_count_in_one_row_at_once_lose_nothing(event):
    casts, found, compiled = known(event, "gelu", (X, "q"))
    together = threading.Barrier(2)

    def work() -> None:
        together.wait()
        for _ in range(2000):
            assert casts.count(found, "gelu", (X, "q"), {}, None, MADE)

    switched = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        run_both(work)
    finally:
        sys.setswitchinterval(switched)
    assert len(compiled.addresses) == 4001
    assert found.elements == 4001 * X.numel()


def run_both(work: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
