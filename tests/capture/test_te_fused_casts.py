"""When casts are counted from the inputs of their function: after a trial that agrees, and for calls that are known."""

from __future__ import annotations

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
        ("rmsnorm_fwd", (X.t(), torch.ones(4), 1e-5, None, "q", None, 0, False), (None, None, torch.ones(32))),
        ("gelu", (X.t(), "q"), None),
        ("dgelu", (X, X.t(), "q"), None),
        ("dgelu", (X[:2], X, "q"), None),
        ("dswiglu", (X, X, "q"), None),
    ],
)
def test_a_call_that_is_not_as_known_is_left_to_the_second_call(name, args, result):
    assert operands_of(name, args, {}, result) is None
